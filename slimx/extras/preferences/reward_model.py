"""The parts of a run that trains a reward model: its steps, its accuracy on held-out pairs, and its export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.errors import SlimxError
from slimx.extras.preferences.bradley_terry import MARGIN, assign_slopes, pair_rows, preference_metrics
from slimx.extras.preferences.head import declare_score, write_score
from slimx.runtime.tasks import in_thread
from slimx.trainer.step.metrics import combine

if TYPE_CHECKING:
    from slimx.observability.live.table import TableColumn
    from slimx.orchestration.batches import Packer
    from slimx.orchestration.ranks.trainers import TrainerGroup
    from slimx.orchestration.run import Run
    from slimx.rollout.flow.rollouts import GroupOutcome


class RewardModel:
    """A `slimx.algorithms.learner.Learner`."""

    @property
    def columns(self) -> tuple[TableColumn, ...]:
        from slimx.observability.live.table import SFT_COLUMNS, TableColumn

        return (
            TableColumn("step", "step", ".0f"),
            TableColumn("loss", "preference/loss", ".4f"),
            TableColumn("accuracy", "preference/accuracy", ".3f"),
            TableColumn("margin", "preference/margin", ".2f"),
            *SFT_COLUMNS[2:],
        )

    def trainer(self) -> type:
        from slimx.extras.preferences.trainer import RewardModelTrainer  # imports megatron-core, on ranks alone

        return RewardModelTrainer

    def rows(self, groups: Sequence[Group]) -> list[TrainingRow]:
        return pair_rows(groups)

    async def train(
        self, run: Run, groups: Sequence[Group], updates: Sequence[Sequence[TrainingRow]]
    ) -> dict[str, float]:
        """One step: each update scores its pairs under the weights that it begins with, then trains on them."""
        margins = [float(group.prompt.metadata.get(MARGIN) or 0.0) for group in groups]
        actor, metrics, at = run.policies[ACTOR], [], 0
        for number, rows in enumerate(updates):
            scores = await _scores(actor.trainers, rows, actor.packer)
            pairs = len(rows) // 2
            found = assign_slopes(rows, scores, margins[at : at + pairs])
            at += pairs
            done = run.step * len(updates) + number
            trained = await actor.trainers.train_step([actor.packer(rows)], step=done, version=run.version)
            metrics.append(found | trained)
        return combine(metrics)

    async def evaluate(self, run: Run, outcomes: Sequence[GroupOutcome]) -> dict[str, float]:
        """Accuracy and margin of held-out pairs, `eval/...`, of all and of each named set; rewards become the scores.

        Raises SlimxError if a pair could not be made."""
        names = [name for name, several in run.eval_prompts.items() for _ in several]
        for outcome in outcomes:
            if outcome.failed:
                raise SlimxError(
                    f"held-out pair {outcome.group.prompt.id} could not be scored: {outcome.detail}",
                )
        actor, rows = run.policies[ACTOR], pair_rows([outcome.group for outcome in outcomes])
        # Every data-parallel rank needs a row: as many as there are, over and over.
        filled = [rows[number % len(rows)] for number in range(max(len(rows), actor.sizes.data))]
        values = await _scores(actor.trainers, filled, actor.packer)
        scores = np.array([value[-1] for value in values[: len(rows)]], np.float64).reshape(-1, 2)
        for outcome, pair in zip(outcomes, scores.tolist(), strict=True):
            ordered = sorted(outcome.group.trajectories, key=lambda trajectory: -(trajectory.reward or 0.0))
            for trajectory, score in zip(ordered, pair, strict=True):
                trajectory.reward = score
        difference = scores[:, 0] - scores[:, 1]
        metrics = _named(difference, "eval/") | {"eval/failed": 0.0}
        for name in run.eval_prompts:
            if name:
                metrics |= _named(difference[[of == name for of in names]], f"eval/{name}/")
        return metrics

    async def write_head(self, trainers: TrainerGroup, path: Path) -> list[str]:
        head = trainers.metrics_of(await trainers.call("model.head", "the head of the reward model"))
        return await in_thread(write_score, path, head)

    def declare(self, directory: Path) -> None:
        declare_score(directory)


async def _scores(trainers: TrainerGroup, rows: Sequence[TrainingRow], packer: Packer) -> list[np.ndarray]:
    """Scores every position by the present weights, one [n] per row."""
    batch = packer(rows)
    each = await trainers.sharded(trainers.folded(batch.shards))
    results = await trainers.call("model.values", "the scores of the reward model", each=each)
    return batch.unpack(trainers.by_shard(results), rows)


def _named(difference: np.ndarray, prefix: str) -> dict[str, float]:
    return {f"{prefix}{name.partition('/')[2]}": value for name, value in preference_metrics(difference).items()}
