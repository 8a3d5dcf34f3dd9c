"""Checks of a run's directory before the run starts or resumes in it, and restoration of the directory's contents if
the start is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slimx.config.schema import Config
from slimx.config.sections.policies import prefix_of
from slimx.data.chat.tokens import copy_tokenizer
from slimx.data.saved.step_files import TOKENIZER
from slimx.durable import replace_synced
from slimx.errors import REFUSED, SlimxError
from slimx.observability.live.activity import FILE
from slimx.observability.live.run_lock import locked
from slimx.observability.tracking.run_files import read_config
from slimx.orchestration.state.saves import CURSOR, RunState, Saves
from slimx.trainer.checkpoint.files import MANIFEST

NAMED = 4
"""Maximum number of changed configuration keys that the message about a finished run lists (see `unused`)."""


def check_start(config: Config, directory: Path, saves: Saves) -> None:
    """Raises SlimxError if a training run must not start in `directory`: `run.resume` forbids it or there is nothing to
    resume from, `slimx generate` has written into it, or `run.fork` is not a checkpoint."""
    if (directory / CURSOR).exists():
        raise SlimxError(
            f"{directory} contains rollouts of slimx generate, which training would replace; choose another "
            f"run.dir, and set rollout.replay={directory} to train on these rollouts",
            code="run.dir",
            about=str(directory),
        )
    newest = saves.newest()
    fork = config.run.fork
    if config.run.resume == "must" and newest is None and fork is None:
        raise SlimxError(
            f"run.resume is must, but {saves.directory} contains no complete checkpoint; set run.resume to auto to "
            "start a new run",
            code="run.resume",
            about="run.resume",
        )
    if config.run.resume == "never" and (directory / "metrics.jsonl").exists():
        raise SlimxError(
            f"run.resume is never, but {directory} contains a run; choose another run.dir or remove this directory",
            code="run.resume",
            about="run.resume",
        )
    begins = newest is None or config.run.resume == "never"
    if begins and fork is not None and not (Path(fork) / MANIFEST).is_file():
        checkpoint = Saves(Path(fork) / "checkpoints", keep=1).newest()
        hint = "set run.fork to a directory RUN/checkpoints/iter_NNNNNNN"
        if checkpoint is not None:
            hint = f"set run.fork to the newest checkpoint in this directory, {checkpoint}"
        raise SlimxError(f"run.fork: {fork} is not a complete checkpoint; {hint}", code="run.fork", about=fork)


def resume_point(config: Config, directory: Path, saves: Saves) -> Path | None:
    """Returns the checkpoint from which a run starts: the run's newest one if there is one and `run.resume` is not
    "never", otherwise `run.fork`; None for a new run. Raises the errors of `check_start`."""
    check_start(config, directory, saves)
    newest = saves.newest()
    if newest is not None and config.run.resume != "never":
        return newest
    return None if config.run.fork is None else Path(config.run.fork)


def finished(config: Config, directory: Path, state: RunState) -> bool:
    """Returns True if the run whose saved state is `state` has completed all steps and written its final export."""
    exported = not config.checkpoint.export_hf or (directory / "hf").is_dir()
    return state.step >= config.schedule.steps and exported


def unused(config: Config) -> str:
    """Returns text to append to the message that a run is finished: a warning that names the keys of `config` whose
    values differ from the finished run's configuration and were therefore not used; "" if no key differs."""
    directory = Path(config.run.dir)
    if not (directory / "config.yaml").is_file():  # a new run that forks a run with more steps
        return ""
    before = dict(_leaves(read_config(directory)))
    now = dict(_leaves(config.model_dump(mode="json")))
    keys = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            keys.append(key)
    if not keys:
        return ""
    listed = ", ".join(keys[:NAMED])
    if len(keys) > NAMED:
        listed += f" and {len(keys) - NAMED} more"
    return f" (the changed values of {listed} were not used, because nothing was trained)"


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of every leaf of the nested dict `value`. `key`: key of `value` itself."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{key}.{name}" if key else str(name))


def write_config(config: Config, directory: Path) -> None:
    """Writes the configuration into the run's directory, and copies the tokenizer of each policy, so that rollouts can
    be decoded even if the model's directory is removed. Raises SlimxError if that fails."""
    replace_synced(directory / "config.yaml", config.to_text().encode())
    for name, policy in config.by_policy.items():
        if policy.served.policy:
            copy_tokenizer(policy.model.path, directory / prefix_of(name) / TOKENIZER)


@contextmanager
def begun(directory: Path) -> Iterator[None]:
    """Locks the directory of a run that is starting. If the start is refused before any part of the run has written a
    log, restores the directory's previous contents. Raises SlimxError if another process has locked the directory or it
    is not writable."""
    before = _DirectoryContents.of(directory)
    with locked(directory):
        try:
            yield
        except SlimxError as error:
            if error.status == REFUSED and logs_in(directory) == before.logs:
                before.restore(directory)
            raise


@dataclass(frozen=True, slots=True)
class _DirectoryContents:
    """Parts of a run directory's contents that must be restored if a start is refused."""

    missing: list[Path]
    """Directories that did not exist before the start: those of the run's directory and its parents, innermost
    first."""
    names: set[str]
    written: dict[str, bytes]
    """Previous contents of the files that every start overwrites, by file name."""
    logs: dict[Path, int]

    @classmethod
    def of(cls, directory: Path) -> _DirectoryContents:
        written: dict[str, bytes] = {}
        for name in ("config.yaml", FILE):
            if (directory / name).is_file():
                written[name] = (directory / name).read_bytes()
        return cls(
            missing=[path for path in (directory, *directory.parents) if not path.exists()],
            names={path.name for path in directory.iterdir()} if directory.is_dir() else set(),
            written=written,
            logs=logs_in(directory),
        )

    def restore(self, directory: Path) -> None:
        for path in directory.iterdir():
            if path.name in self.names:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for name, content in self.written.items():
            (directory / name).write_bytes(content)
        with suppress(OSError):  # fails if another process has created a file there
            for path in self.missing:
                path.rmdir()


def logs_in(directory: Path) -> dict[Path, int]:
    """Returns the size in bytes of each log file of the run's parts."""
    return {path: path.stat().st_size for path in (directory / "logs").glob("*")}
