"""A rule about initial weights that are a run's directory."""

from __future__ import annotations

from pathlib import Path

from slimx.config.rule import Problems, rule
from slimx.config.sections.trainer import Trainer
from slimx.models.files.torch_dist import TRACKER


@rule("weights.run", "trainer.load")
def is_checkpoint(trainer: Trainer, local_device: str) -> Problems:
    """Rejects the directory of a run, and names that of its checkpoints, whose newest one is loaded. `local_device` is
    unused, but excludes the rule from `slimx plan`, which needs no weights."""
    if trainer.load is not None and (Path(trainer.load) / "checkpoints" / TRACKER).is_file():
        yield f"trainer.load: {trainer.load} is the directory of a run; set trainer.load={trainer.load}/checkpoints"
