"""Looks at what a run's directory holds before the run begins in it, or goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.data.chat.tokens import copy_tokenizer
from slimx.data.saved.step_files import TOKENIZER
from slimx.durable import replace_synced
from slimx.errors import REFUSED, SlimxError
from slimx.observability.live.activity import FILE
from slimx.observability.live.run_lock import held
from slimx.observability.tracking.run_files import read_config
from slimx.orchestration.state.saves import CURSOR, RunState, Saves
from slimx.trainer.checkpoint.files import MANIFEST

EVALUATIONS = "eval"
"""Folder of a run directory: logs of the engines of `slimx eval`, and a line in `results.jsonl` for each."""

NAMED = 4
"""Keys that a sentence names, at most."""


def check_start(config: Config, directory: Path, saves: Saves) -> None:
    """Raise SlimxError where `run.resume` forbids to go on from what the directory holds, or to begin; where
    `slimx generate` has written into it; or where `run.fork` would begin from what is no checkpoint."""
    if (directory / CURSOR).exists():
        raise SlimxError(
            f"{directory} holds rollouts of slimx generate, which training would replace; choose another run.dir, with "
            f"rollout.replay={directory} to train on them",
            code="run.dir",
            about=str(directory),
        )
    newest, fork = saves.newest(), config.run.fork
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
        there = Saves(Path(fork) / "checkpoints", keep=1).newest()
        hint = f"its newest is {there}" if there is not None else "name a RUN/checkpoints/iter_NNNNNNN"
        raise SlimxError(f"run.fork: {fork} is no complete checkpoint; {hint}", code="run.fork", about=fork)


def check_generation(config: Config, directory: Path, saves: Saves) -> None:
    """Raise SlimxError where `slimx generate` cannot begin in a directory, or go on from its position, the newest of
    `saves`."""
    if config.run.fork:
        raise SlimxError(
            "run.fork continues training, and slimx generate trains nothing; leave it out",
            code="run.fork",
            about="run.fork",
        )
    if (directory / "checkpoints").exists():
        raise SlimxError(
            f"{directory} holds a training run; slimx generate needs a run.dir of its own",
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
    """The checkpoint that a run goes on from; None: it begins. Raises SlimxError as `check_start` does."""
    check_start(config, directory, saves)
    newest = saves.newest()
    if newest is not None and config.run.resume != "never":
        return newest
    return None if config.run.fork is None else Path(config.run.fork)


def finished(config: Config, directory: Path, state: RunState) -> bool:
    """Returns True if nothing is left to be done after `state`."""
    exported = not config.checkpoint.export_hf or (directory / "hf").is_dir()
    return state.step >= config.schedule.steps and exported


def unused(config: Config) -> str:
    """The end of a sentence about a finished run: the keys of `config` that differ from what the run was done with, and
    change nothing now; "" if none does."""
    directory = Path(config.run.dir)
    if not (directory / "config.yaml").is_file():  # it forks from a run that is further
        return ""
    before = dict(_leaves(read_config(directory)))
    now = dict(_leaves(config.model_dump(mode="json")))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    named = ", ".join(keys[:NAMED]) + (f" and {len(keys) - NAMED} more" if len(keys) > NAMED else "")
    return f" (not used, as nothing was trained: the new {named})" if keys else ""


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{key}.{name}" if key else str(name))


def write_config(config: Config, directory: Path) -> None:
    """Write the configuration into a run's directory, and with it the tokenizer by which its rollouts are read, where
    the model need not be. Raises SlimxError where that cannot be."""
    replace_synced(directory / "config.yaml", config.to_text().encode())
    if config.rollout.policy_engines:
        copy_tokenizer(config.model.path, directory / TOKENIZER)


@contextmanager
def begun(directory: Path) -> Iterator[None]:
    """Hold the directory of a run that begins. A start that is refused before any part of the run has a log leaves
    what was there as it was, and nothing new. Raises SlimxError as `held` does."""
    before = _Contents.of(directory)
    with held(directory):
        try:
            yield
        except SlimxError as error:
            if error.status == REFUSED and _logs(directory) == before.logs:
                before.restore(directory)
            raise


@dataclass(frozen=True, slots=True)
class _Contents:
    """The contents of a run's directory before a start."""

    missing: list[Path]
    """The directory and its parents that were not there, innermost first."""
    names: set[str]
    written: dict[str, bytes]
    """Contents of the files that each start writes anew."""
    logs: dict[Path, int]

    @classmethod
    def of(cls, directory: Path) -> _Contents:
        return cls(
            missing=[path for path in (directory, *directory.parents) if not path.exists()],
            names={path.name for path in directory.iterdir()} if directory.is_dir() else set(),
            written={name: path.read_bytes() for name in ("config.yaml", FILE) if (path := directory / name).is_file()},
            logs=_logs(directory),
        )

    def restore(self, directory: Path) -> None:
        for path in directory.iterdir():
            if path.name not in self.names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, content in self.written.items():
            (directory / name).write_bytes(content)
        with suppress(OSError):  # somebody has put something else there
            for path in self.missing:
                path.rmdir()


def _logs(directory: Path) -> dict[Path, int]:
    """Bytes of each log of the run's parts."""
    return {path: path.stat().st_size for path in (directory / "logs").glob("*")}
