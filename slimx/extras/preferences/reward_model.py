"""Training of a reward model in a run: training steps, accuracy on held-out pairs, and export."""

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
    """Learner (`slimx.algorithms.learner.Learner`) that trains a reward model instead of a policy."""

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
        from slimx.extras.preferences.trainer import RewardModelTrainer  # imports megatron-core, so only on ranks

        return RewardModelTrainer

    def rows(self, groups: Sequence[Group]) -> list[TrainingRow]:
        return pair_rows(groups)

    async def train(
        self, run: Run, groups: Sequence[Group], updates: Sequence[Sequence[TrainingRow]]
    ) -> dict[str, float]:
        """Runs a training step: for each update, computes the scores of the update's pairs with the current weights,
        and then trains on the pairs. Returns metrics of the step."""
        margins = [float(group.prompt.metadata.get(MARGIN) or 0.0) for group in groups]
        actor = run.policies[ACTOR]
        metrics = []
        first = 0
        for index, rows in enumerate(updates):
            scores = await _scores(actor.trainers, rows, actor.packer)
            pairs = len(rows) // 2
            measured = assign_slopes(rows, scores, margins[first : first + pairs])
            first += pairs
            step = run.step * len(updates) + index
            trained = await actor.trainers.train_step([actor.packer(rows)], step=step, version=run.version)
            metrics.append(measured | trained)
        return combine(metrics)

    async def evaluate(self, run: Run, outcomes: Sequence[GroupOutcome]) -> dict[str, float]:
        """Returns the accuracy and the margin on held-out pairs (`eval/...`), over all pairs and for each named set of
        pairs. Replaces the rewards of the trajectories in `outcomes` with the model's scores. Raises SlimxError if a
        pair has failed."""
        names: list[str] = []
        for name, prompts in run.eval_prompts.items():
            names += [name] * len(prompts)
        groups = []
        for outcome in outcomes:
            if outcome.failed or outcome.group is None:
                prompt = "?" if outcome.group is None else outcome.group.prompt.id
                raise SlimxError(
                    f"the held-out pair of prompt {prompt} could not be scored ({outcome.detail}); correct "
                    "this pair in the file that eval.prompts names",
                )
            groups.append(outcome.group)
        actor = run.policies[ACTOR]
        rows = pair_rows(groups)
        # Rows are repeated until every data-parallel rank has one.
        filled = [rows[index % len(rows)] for index in range(max(len(rows), actor.sizes.data))]
        values = await _scores(actor.trainers, filled, actor.packer)
        scores = np.array([value[-1] for value in values[: len(rows)]], np.float64).reshape(-1, 2)
        for group, pair in zip(groups, scores.tolist(), strict=True):
            ordered = sorted(group.trajectories, key=lambda trajectory: -(trajectory.reward or 0.0))
            for trajectory, score in zip(ordered, pair, strict=True):
                trajectory.reward = score
        difference = scores[:, 0] - scores[:, 1]
        metrics = _prefixed(difference, "eval/") | {"eval/failed": 0.0}
        for name in run.eval_prompts:
            if name:
                metrics |= _prefixed(difference[[source == name for source in names]], f"eval/{name}/")
        return metrics

    async def write_head(self, trainers: TrainerGroup, path: Path) -> list[str]:
        head = trainers.metrics_of(await trainers.call("model.head", "the transfer of the reward model's head"))
        return await in_thread(write_score, path, head)

    def declare(self, directory: Path) -> None:
        declare_score(directory)


async def _scores(trainers: TrainerGroup, rows: Sequence[TrainingRow], packer: Packer) -> list[np.ndarray]:
    """Returns the reward model's values with the current weights at all positions, one array [positions] for each row.
    The last value of a row is its score."""
    batch = packer(rows)
    shards = await trainers.sharded(trainers.folded(batch.shards))
    results = await trainers.call("model.values", "the scores of the reward model", per_rank=shards)
    return batch.unpack(trainers.by_shard(results), rows)


def _prefixed(difference: np.ndarray, prefix: str) -> dict[str, float]:
    return {f"{prefix}{name.partition('/')[2]}": value for name, value in preference_metrics(difference).items()}
