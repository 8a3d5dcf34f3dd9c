"""Builds the updates that the trainers compute from the groups of one step.

A step trains `prompts_per_step` groups of `group_size` rollouts in `updates_per_step` updates. An update is one
optimizer step on whole groups with its own denominators. Its trajectories are packed into micro-batches, the same
number for every data-parallel rank; their gradients are summed before the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np

from slimx.algorithms.learner import learner_of
from slimx.config.schema import Config
from slimx.data.batch import TrainBatch, TrainingRow, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Group, Trajectory
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.models.flops import sequence_flops
from slimx.numerics.rounding import rounding_of

Packer = Callable[[Sequence[TrainingRow]], TrainBatch]
"""Packs rows into micro-batches."""


def make_packer(config: Config, spec: ModelSpec, sizes: Sizes) -> Packer:
    """Returns a function that packs rows for a layout and a configuration."""
    cost: Callable[[int], float] = float
    if config.trainer.balance == "flops":
        cost = sequence_flops(spec.transformer, spec.vocab_size, spec.layer_kind)
    return partial(
        pack,
        data_size=sizes.data,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        multiple_of=sizes.tensor * sizes.context * rounding_of(config.trainer).TOKENS,
        sequence_multiple=sizes.sequence_multiple,
        count_multiple=sizes.pipeline if sizes.virtual > 1 else 1,
        cost=cost,
        lockstep=sizes.expert * sizes.expert_tensor > sizes.tensor * sizes.context,
    )


def longest_trajectory(config: Config, spec: ModelSpec, *layouts: Sizes) -> int:
    """Returns the length of the longest trajectory that the model supports and trainers of all `layouts` can train, in
    tokens: n tokens have n - 1 positions."""
    limit = config.trainer.max_tokens_per_microbatch
    positions = min(limit // sizes.sequence_multiple * sizes.sequence_multiple for sizes in layouts)
    # A reward model reads the last token, too.
    if not config.algorithm.scores:
        positions += 1
    return min(positions, spec.gpt["max_sequence_length"])


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """Returns the trajectories of all groups, in order."""
    return list(chain.from_iterable(group.trajectories for group in groups))


def make_update_rows(
    config: Config, groups: Sequence[Group], advantages: Callable[[Sequence[Group]], Sequence[float | np.ndarray]]
) -> list[list[TrainingRow]]:
    """Returns the rows of one step's updates, in order; a group is never split. `advantages` returns the advantages of
    all trajectories of the step, group by group."""
    learner = learner_of(config.algorithm)
    if learner is not None:
        return [learner.rows(part) for part in split_groups(groups, config.schedule.updates_per_step)]
    if config.algorithm.mask_stale_tokens:
        groups = [group.newest_only() for group in groups]
    updates = []
    values = iter(advantages(groups))
    for part in split_groups(groups, config.schedule.updates_per_step):
        trajectories = trajectories_of(part)
        weights = loss_weights(
            trajectories, config.algorithm.aggregation, length=config.rollout.sampling.max_new_tokens
        )
        updates.append(make_rows(trajectories, list(islice(values, len(trajectories))), weights, config.algorithm))
    return updates


def split_groups(groups: Sequence[Group], updates: int) -> list[Sequence[Group]]:
    """Splits groups into consecutive updates: a group's update does not depend on its length or reward."""
    size, remainder = divmod(len(groups), updates)
    parts = []
    start = 0
    for index in range(updates):
        stop = start + size
        if index < remainder:
            stop += 1
        parts.append(groups[start:stop])
        start = stop
    return parts


def batch_metrics(updates: Sequence[TrainBatch]) -> dict[str, float]:
    """Returns number of micro-batches, padding and imbalance of a step's packed trajectories."""
    packed = list(chain.from_iterable(chain.from_iterable(update.shards for update in updates)))
    positions = sum(len(batch.tokens) for batch in packed)
    return {
        "batch/microbatches": float(sum(len(update.shards[0]) for update in updates)),
        "batch/padding": float(sum(batch.padding.sum() for batch in packed)) / positions,
        "batch/imbalance": sum(update.imbalance for update in updates) / len(updates),
    }
