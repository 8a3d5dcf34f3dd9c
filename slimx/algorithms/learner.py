"""Training of a model that is not a policy, such as a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slimx import entry_points
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import TrainingRow
from slimx.data.records import Group

if TYPE_CHECKING:
    from slimx.observability.live.table import TableColumn


class Learner(Protocol):
    """Parts of a run that differ if its model outputs scores instead of logits."""

    columns: Sequence[TableColumn]
    """Columns of the table that the run prints."""

    def trainer(self) -> type:
        """Returns the class of the role `model` of trainer ranks."""
        ...

    def rows(self, groups: Sequence[Group]) -> list[TrainingRow]:
        """Returns the rows of one update."""
        ...

    async def train(
        self, run: object, groups: Sequence[Group], updates: Sequence[Sequence[TrainingRow]]
    ) -> dict[str, float]:
        """Trains one step; returns its metrics."""
        ...

    async def evaluate(self, run: object, outcomes: Sequence[object]) -> dict[str, float]:
        """Returns the metrics of held-out prompts, and sets their scores as rewards of trajectories."""
        ...

    async def write_head(self, trainers: object, path: Path) -> list[str]:
        """Writes the layer that outputs scores as a safetensors file; returns the names of its tensors."""
        ...

    def declare(self, directory: Path) -> None:
        """Sets the exported model's class in config.json of `directory`, which was written for a policy."""
        ...


def learner_of(algorithm: Algorithm) -> Learner | None:
    """Returns the learner of a loss on scores, an entry point of `slimx.learners`; None for a policy."""
    if not algorithm.scores:
        return None
    return entry_points.load("slimx.learners", algorithm.loss.kind)()
