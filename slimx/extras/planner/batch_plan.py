"""The batch plan: a step's prompts, rollouts, updates and micro-batches, by arithmetic on the configuration alone."""

from __future__ import annotations

from math import ceil

from slimx.config.schema import Config
from slimx.config.sections.schedule import batches_in_flight
from slimx.extras.planner.record import BatchPlan
from slimx.layout.ranks import Sizes


def batch_plan(config: Config, sizes: Sizes) -> BatchPlan:
    """The batch of one step; figures of micro-batches are for rollouts that are all as long as they may be."""
    rollout, updates = config.rollout, config.schedule.updates_per_step
    rollouts = rollout.prompts_per_step * rollout.group_size
    longest = rollout.longest
    limit = config.trainer.max_tokens_per_microbatch
    # Of demonstrations nobody knows how long they are: one that fills a micro-batch.
    row = sizes.packed_length(longest - 1) if rollout.policy_engines else limit
    rows = ceil(rollouts / updates / sizes.data)
    microbatches = ceil(rows / max(1, limit // row))
    if sizes.virtual > 1:
        microbatches = ceil(microbatches / sizes.pipeline) * sizes.pipeline
    bubble = (sizes.pipeline - 1) / (sizes.virtual * microbatches + sizes.pipeline - 1)
    return BatchPlan(
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        rollouts_per_step=rollouts,
        updates_per_step=updates,
        rollouts_per_update=rollouts // updates,
        rollouts_per_data_rank=rows,
        tokens_per_rollout=longest if rollout.policy_engines else row,
        tokens_per_step=rollouts * (longest if rollout.policy_engines else row),
        tokens_per_microbatch=limit,
        tokens_per_context_rank=ceil(limit / sizes.context),
        microbatches_per_update=microbatches,
        bubble=round(bubble, 4),
        requests_in_flight=min(rollout.concurrency, ceil(rollouts * batches_in_flight(rollout, config.schedule)))
        if rollout.policy_engines
        else 0,
    )
