"""Looks at what a run's directory holds before the run begins in it, or goes on."""

from __future__ import annotations

from pathlib import Path

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.orchestration.state.saves import CURSOR, Saves
from slimx.trainer.checkpoint.files import MANIFEST


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
