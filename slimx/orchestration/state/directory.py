"""Checks of a run's directory before the run starts or resumes in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slimx.config.schema import Config
from slimx.data.chat.tokens import copy_tokenizer
from slimx.data.saved.step_files import TOKENIZER
from slimx.durable import replace_synced
from slimx.errors import REFUSED, SlimxError
from slimx.observability.live.activity import FILE
from slimx.observability.live.run_lock import locked
from slimx.observability.tracking.run_files import read_config
from slimx.orchestration.state.saves import CURSOR, RunState, Saves
from slimx.trainer.checkpoint.files import MANIFEST

EVALUATIONS = "eval"
"""Folder of a run directory with the engines' logs of `slimx eval` and a line per evaluation in `results.jsonl`."""

NAMED = 4
"""Keys listed in a sentence, at most."""


def check_start(config: Config, directory: Path, saves: Saves) -> None:
    """Raises SlimxError if `run.resume` forbids starting in the directory or finds nothing there to resume from, if
    `slimx generate` has written into it, or if `run.fork` is not a checkpoint."""
    if (directory / CURSOR).exists():
        raise SlimxError(
            f"{directory} holds rollouts of slimx generate, which training would replace; choose another run.dir, with "
            f"rollout.replay={directory} to train on them",
            code="run.dir",
            about=str(directory),
        )
    newest = saves.newest()
    fork = config.run.fork
    if config.run.resume == "must" and newest is None and fork is None:
        raise SlimxError(
            f"run.resume is must, but {saves.directory} holds no complete checkpoint; set it to auto to begin",
            code="run.resume",
            about="run.resume",
        )
    if config.run.resume == "never" and (directory / "metrics.jsonl").exists():
        raise SlimxError(
            f"run.resume is never, but {directory} already holds a run; choose another run.dir or remove it",
            code="run.resume",
            about="run.resume",
        )
    begins = newest is None or config.run.resume == "never"
    if begins and fork is not None and not (Path(fork) / MANIFEST).is_file():
        checkpoint = Saves(Path(fork) / "checkpoints", keep=1).newest()
        hint = "name a RUN/checkpoints/iter_NNNNNNN"
        if checkpoint is not None:
            hint = f"its newest is {checkpoint}"
        raise SlimxError(f"run.fork: {fork} is not a complete checkpoint; {hint}", code="run.fork", about=fork)


def check_generation(config: Config, directory: Path, saves: Saves) -> None:
    """Raises SlimxError if `slimx generate` cannot start in a directory, or resume from its position, the newest of
    `saves`."""
    if config.run.fork:
        raise SlimxError(
            "run.fork continues training, and slimx generate trains nothing; leave it out",
            code="run.fork",
            about="run.fork",
        )
    if (directory / "checkpoints").exists():
        raise SlimxError(
            f"{directory} holds a training run; slimx generate needs another run.dir",
            code="run.dir",
            about=str(directory),
        )
    if config.run.resume == "never" and (directory / "metrics.jsonl").exists():
        raise SlimxError(
            f"run.resume is never, but {directory} already holds rollouts; choose another run.dir",
            code="run.resume",
            about="run.resume",
        )
    if config.run.resume == "must" and saves.newest() is None:
        raise SlimxError(
            f"run.resume is must, but {saves.directory} holds no position",
            code="run.resume",
            about="run.resume",
        )


def resume_point(config: Config, directory: Path, saves: Saves) -> Path | None:
    """Returns the checkpoint that a run resumes from; None for a new run. Raises SlimxError as `check_start` does."""
    check_start(config, directory, saves)
    newest = saves.newest()
    if newest is not None and config.run.resume != "never":
        return newest
    return None if config.run.fork is None else Path(config.run.fork)


def finished(config: Config, directory: Path, state: RunState) -> bool:
    """Returns True if nothing remains to be done after `state`."""
    exported = not config.checkpoint.export_hf or (directory / "hf").is_dir()
    return state.step >= config.schedule.steps and exported


def unused(config: Config) -> str:
    """Returns the end of a sentence about a finished run: keys of `config` that differ from the run's configuration and
    have no effect now; "" if there are none."""
    directory = Path(config.run.dir)
    if not (directory / "config.yaml").is_file():  # a fork of a run that is already further
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
    return f" (not used, as nothing was trained: the new {listed})"


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yields dotted key and value of every leaf of a nested dict."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{key}.{name}" if key else str(name))


def write_config(config: Config, directory: Path) -> None:
    """Writes the configuration and the tokenizer into a run's directory; the tokenizer decodes the rollouts after the
    model's directory is gone. Raises SlimxError if that fails."""
    replace_synced(directory / "config.yaml", config.to_text().encode())
    if config.rollout.policy_engines:
        copy_tokenizer(config.model.path, directory / TOKENIZER)


@contextmanager
def begun(directory: Path) -> Iterator[None]:
    """Locks the directory of a starting run. If the start is refused before any part has logged, restores the previous
    contents. Raises SlimxError as `locked` does."""
    before = _DirectoryContents.of(directory)
    with locked(directory):
        try:
            yield
        except SlimxError as error:
            if error.status == REFUSED and _logs(directory) == before.logs:
                before.restore(directory)
            raise


@dataclass(frozen=True, slots=True)
class _DirectoryContents:
    """Contents of a run's directory before a start."""

    missing: list[Path]
    """The directory and its parents that did not exist, innermost first."""
    names: set[str]
    written: dict[str, bytes]
    """Contents of the files that every start overwrites."""
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
            logs=_logs(directory),
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
        with suppress(OSError):  # another process has created a file there
            for path in self.missing:
                path.rmdir()


def _logs(directory: Path) -> dict[Path, int]:
    """Returns the size of each log of the run's parts, in bytes."""
    return {path: path.stat().st_size for path in (directory / "logs").glob("*")}
