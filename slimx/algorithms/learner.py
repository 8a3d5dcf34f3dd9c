"""Interface of extensions that train a model that is not a policy, such as a reward model."""

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
    """Interface of the operations that a run performs differently for a model that outputs scores instead of logits,
    such as a reward model."""

    columns: Sequence[TableColumn]
    """Columns of the metrics table that the run prints."""

    def trainer(self) -> type:
        """Returns the class that implements a trainer rank for this model."""

    def rows(self, groups: Sequence[Group]) -> list[TrainingRow]:
        """Returns the training rows for one optimizer update on the trajectories in `groups`."""

    async def train(
        self, run: object, groups: Sequence[Group], updates: Sequence[Sequence[TrainingRow]]
    ) -> dict[str, float]:
        """Trains one step, which consists of `updates`, and returns the step's metrics. `run`: the training run."""

    async def evaluate(self, run: object, outcomes: Sequence[object]) -> dict[str, float]:
        """Sets the reward of each trajectory in `outcomes`, the rollouts of held-out prompts, to the trajectory's
        score, and returns metrics of these scores."""

    async def write_head(self, trainers: object, path: Path) -> list[str]:
        """Writes the weights of the layer that outputs scores to `path` as a safetensors file, and returns the names of
        the tensors."""

    def declare(self, directory: Path) -> None:
        """Replaces the policy's model class in config.json of the exported checkpoint `directory` with the class of
        this model."""


def learner_of(algorithm: Algorithm) -> Learner | None:
    """Returns the learner for an algorithm whose loss is computed from scores, such as a reward model's; None if the
    algorithm trains a policy. Learners are entry points in the group `slimx.learners`, named after the loss."""
    if not algorithm.scores:
        return None
    return entry_points.load("slimx.learners", algorithm.loss.kind)()
