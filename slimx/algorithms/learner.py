"""Training of something other than a policy, such as a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slimx import entry_points
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import TrainingRow
from slimx.data.records import Group


class Learner(Protocol):
    """Parts of a run that differ where its model has scores in the place of logits."""

    columns: Sequence[Any]
    """Columns of the table that the run prints."""

    def trainer(self) -> type:
        """Return the class of the role `model` of trainer ranks."""
        ...

    def rows(self, groups: Sequence[Group]) -> list[TrainingRow]:
        """Return the rows of one update."""
        ...

    async def train(
        self, run: Any, groups: Sequence[Group], updates: Sequence[Sequence[TrainingRow]]
    ) -> dict[str, float]:
        """Train one step; return its metrics."""
        ...

    async def evaluate(self, run: Any, outcomes: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of held-out prompts, and make their scores the rewards of trajectories."""
        ...

    async def write_head(self, trainers: Any, path: Path) -> list[str]:
        """Write the layer that gives scores as a safetensors file; return the names of its tensors."""
        ...

    def declare(self, directory: Path) -> None:
        """Name the exported model's class in config.json of `directory`, which is that of a policy."""
        ...


def learner_of(algorithm: Algorithm) -> Learner | None:
    """Return the learner of a loss of scores, an entry point of `slimx.learners`; None where a policy is trained."""
    return entry_points.load("slimx.learners", algorithm.loss.kind)() if algorithm.scores else None
