"""A rule about initial weights that are a run's directory."""

from __future__ import annotations

from pathlib import Path

from slimx.config.rule import Problems, rule
from slimx.config.sections.trainer import Trainer
from slimx.orchestration.state.saves import Saves


@rule("weights.run", "trainer.load")
def is_checkpoint(trainer: Trainer, local_device: str) -> Problems:
    """Rejects the directory of a run, and names its newest checkpoint. `local_device` is unused, but excludes the rule
    from `slimx plan`, which needs no weights."""
    if trainer.load is not None:
        newest = Saves(Path(trainer.load) / "checkpoints", keep=1).newest()
        if newest is not None:
            yield f"trainer.load: {trainer.load} is the directory of a run; set trainer.load={newest}"
