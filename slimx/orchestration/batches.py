"""One step's groups -> the updates that the trainers compute.

A step trains `prompts_per_step` groups of `group_size` rollouts in `updates_per_step` updates. An update is one
optimizer step on whole groups with denominators of its own. Its trajectories are packed into micro-batches, equally
many for every data-parallel rank; the gradients of all of them are summed before the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np

from slimx.algorithms.learner import learner_of
from slimx.config.schema import Config
from slimx.data.batch import TrainBatch, TrainingRow, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Group
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.models.flops import sequence_flops
from slimx.numerics.rounding import rounding_of

Packer = Callable[[Sequence[TrainingRow]], TrainBatch]


def make_packer(config: Config, spec: ModelSpec, sizes: Sizes) -> Packer:
    """Packs rows as layout and configuration want them."""
    flops = config.trainer.balance == "flops"
    return partial(
        pack,
        data_size=sizes.data,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        multiple_of=sizes.tensor * sizes.context * rounding_of(config.trainer).TOKENS,
        sequence_multiple=sizes.sequence_multiple,
        count_multiple=sizes.pipeline if sizes.virtual > 1 else 1,
        cost=sequence_flops(spec.transformer, spec.vocab_size, spec.layer_kind) if flops else float,
        lockstep=sizes.expert * sizes.expert_tensor > sizes.tensor * sizes.context,
    )


def longest_trajectory(config: Config, spec: ModelSpec, *layouts: Sizes) -> int:
    """Tokens of the longest trajectory that the model is made for and trainers of all `layouts` can take: n tokens have
    n - 1 positions."""
    limit = config.trainer.max_tokens_per_microbatch
    positions = min(limit // sizes.sequence_multiple * sizes.sequence_multiple for sizes in layouts)
    # A reward model reads the last token, too.
    return min(positions + (not config.algorithm.scores), spec.gpt["max_sequence_length"])


def make_update_rows(
    config: Config, groups: Sequence[Group], advantages: Callable[[Sequence[Group]], Sequence[float | np.ndarray]]
) -> list[list[TrainingRow]]:
    """The rows of one step's updates, in order; each group is in one of them, whole. `advantages`: of every trajectory
    of the step, group after group."""
    if (learner := learner_of(config.algorithm)) is not None:
        return [learner.rows(part) for part in split_groups(groups, config.schedule.updates_per_step)]
    if config.algorithm.mask_stale_tokens:
        groups = [group.newest_only() for group in groups]
    out, values = [], iter(advantages(groups))
    for part in split_groups(groups, config.schedule.updates_per_step):
        trajectories = [trajectory for group in part for trajectory in group.trajectories]
        weights = loss_weights(
            trajectories, config.algorithm.aggregation, length=config.rollout.sampling.max_new_tokens
        )
        out.append(make_rows(trajectories, list(islice(values, len(trajectories))), weights, config.algorithm))
    return out


def split_groups(groups: Sequence[Group], updates: int) -> list[Sequence[Group]]:
    """Neighbours stay together, in order: which update a group is in does not depend on its length or reward."""
    size, left = divmod(len(groups), updates)
    starts = [number * size + min(number, left) for number in range(updates + 1)]
    return [groups[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]


def batch_metrics(updates: Sequence[TrainBatch]) -> dict[str, float]:
    """Micro-batches, padding and imbalance of a step's packed trajectories."""
    packed = [batch for update in updates for shard in update.shards for batch in shard]
    positions = sum(len(batch.tokens) for batch in packed)
    return {
        "batch/microbatches": float(sum(len(update.shards[0]) for update in updates)),
        "batch/padding": float(sum(batch.padding.sum() for batch in packed)) / positions,
        "batch/imbalance": sum(update.imbalance for update in updates) / len(updates),
    }
