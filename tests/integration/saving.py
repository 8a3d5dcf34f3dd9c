"""The driver's part of `Trainer.save`, for ranks that run without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimx.trainer.checkpoint import files
from tests.processes import wait_for


def begin_save(trainer: Any, path: Path, *, step: int) -> None:
    """Make the directory and start the save; collective. What follows may change the trainer."""
    if trainer.parallel.rank == 0:
        (path / files.REPORTS).mkdir(parents=True)
    trainer.parallel.host_group.barrier().wait()
    trainer.save(str(path), step=step)


def finish_save(trainer: Any, path: Path, deadline_s: float = 300.0) -> None:
    """Wait until every rank has written its part; raises what a rank reports."""
    ranks = range(trainer.parallel.sizes.world)
    wait_for(lambda: not files.unreported(path, ranks), deadline_s)
