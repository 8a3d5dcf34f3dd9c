"""Builds the updates of one training step from the step's groups; an update is the batch of one optimizer step.

A step trains on `prompts_per_step` groups of `group_size` rollouts, in `updates_per_step` updates. An update consists
of whole groups, and its loss is normalized over the update alone. The trajectories of an update are packed into
micro-batches, the same number for every data-parallel rank. The gradients of all micro-batches are summed before the
optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np

from slimx.algorithms.learner import learner_of
from slimx.config.schema import Config
from slimx.data.batch import TrainBatch, TrainingRow, make_rows
from slimx.data.loss_weights import trained_weights
from slimx.data.packing import pack
from slimx.data.records import Group, Trajectory
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.models.flops import sequence_flops
from slimx.numerics.rounding import rounding_of

Packer = Callable[[Sequence[TrainingRow]], TrainBatch]
"""Function that packs the training rows (one per trajectory) of one update into micro-batches for every data-parallel
rank."""


def make_packer(config: Config, spec: ModelSpec, sizes: Sizes) -> Packer:
    """Returns a function that packs the training rows of an update into micro-batches for the parallel sizes `sizes`.
    Section `trainer` of `config` sets the token limit of a micro-batch and the cost that is balanced over data-parallel
    ranks. `spec`: model whose FLOPs are the cost if `trainer.balance` is "flops"."""
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
    """Returns the length in tokens of the longest trajectory that the model supports and that fits into one micro-batch
    with each of the parallel sizes in `layouts`. A trajectory of n tokens occupies n - 1 positions of a micro-batch;
    for a reward model, n positions."""
    limit = config.trainer.max_tokens_per_microbatch
    positions = min(limit // sizes.sequence_multiple * sizes.sequence_multiple for sizes in layouts)
    # A reward model also reads the last token, so n tokens occupy n positions.
    if not config.algorithm.scores:
        positions += 1
    return min(positions, spec.gpt["max_sequence_length"])


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """Returns the trajectories of all groups as one list, group by group."""
    return list(chain.from_iterable(group.trajectories for group in groups))


def make_update_rows(
    config: Config, groups: Sequence[Group], advantages: Callable[[Sequence[Group]], Sequence[float | np.ndarray]]
) -> list[list[TrainingRow]]:
    """Returns the training rows of each update of a step; no group is split between updates. `advantages`: function
    that computes the advantages of all trajectories in a sequence of groups, group by group."""
    learner = learner_of(config.algorithm)
    if learner is not None:
        return [learner.rows(part) for part in split_groups(groups, config.schedule.updates_per_step)]
    if config.algorithm.mask_stale_tokens:
        groups = [group.newest_only() for group in groups]
    updates = []
    values = iter(advantages(groups))
    for part in split_groups(groups, config.schedule.updates_per_step):
        trajectories = trajectories_of(part)
        weights = trained_weights(
            trajectories, config.algorithm.aggregation, length=config.rollout.sampling.max_new_tokens
        )
        updates.append(make_rows(trajectories, list(islice(values, len(trajectories))), weights, config.algorithm))
    return updates


def split_groups(groups: Sequence[Group], updates: int) -> list[Sequence[Group]]:
    """Splits the groups, without reordering them, into `updates` consecutive parts of nearly equal size, so that a
    group's length and reward have no influence on which update trains on the group."""
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
    """Returns the number of micro-batches of a step, the fraction of positions that are padding, and the mean imbalance
    of the updates: the relative time lost by waiting for the slowest data-parallel rank."""
    batches = chain.from_iterable(chain.from_iterable(update.shards for update in updates))
    positions = sum(sum(batch.lengths) for batch in batches)
    return {
        "batch/microbatches": float(sum(len(update.shards[0]) for update in updates)),
        "batch/padding": (positions - sum(update.tokens for update in updates)) / positions,
        "batch/imbalance": sum(update.imbalance for update in updates) / len(updates),
    }
