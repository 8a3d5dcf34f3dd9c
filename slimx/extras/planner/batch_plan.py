"""The batch plan: numbers of prompts, rollouts, updates and micro-batches in one step, computed from the configuration
alone. Also the CPU load of the processes that generate the rollouts."""

from __future__ import annotations

from math import ceil

from slimx.cluster.starting import worker_count
from slimx.config.schema import Config
from slimx.config.sections.rollout import batches_in_flight
from slimx.extras.evaluation.settings import lengths
from slimx.extras.planner.record import BatchPlan, RolloutLoad
from slimx.extras.rollout_workers.load import load_of, traffic_of
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec


def batch_plan(config: Config, sizes: Sizes) -> BatchPlan:
    """Returns the batch plan of one step. `sizes`: parallel sizes of the trainer. The numbers of micro-batches assume
    that all rollouts have the maximum length."""
    rollout = config.rollout
    updates = config.schedule.updates_per_step
    rollouts = rollout.prompts_per_step * rollout.group_size
    longest = rollout.longest
    limit = config.trainer.max_tokens_per_microbatch
    in_flight = 0
    if config.served.policy:
        row = sizes.packed_length(longest - 1)
        tokens = longest
        in_flight = min(rollout.concurrency, ceil(rollouts * batches_in_flight(rollout, config.schedule)))
    else:
        # The length of demonstrations is unknown, so each is assumed to fill a micro-batch.
        row = limit
        tokens = limit
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
        tokens_per_rollout=tokens,
        tokens_per_answer=max((rollout.max_prompt_tokens + new for new in lengths(config.eval).values()), default=0),
        tokens_per_step=rollouts * tokens,
        tokens_per_microbatch=limit,
        tokens_per_context_rank=ceil(limit / sizes.context),
        microbatches_per_update=microbatches,
        bubble=round(bubble, 4),
        requests_in_flight=in_flight,
    )


def rollout_load(config: Config, spec: ModelSpec) -> RolloutLoad | None:
    """Returns the estimated load of driver and rollout workers; None if the policy has no engines on GPUs."""
    traffic = traffic_of(config, spec)
    if traffic is None:
        return None
    load = load_of(traffic)
    workers = worker_count(config)
    driver = load.driver
    worker = 0.0
    if workers:
        worker = load.workers / workers
    else:
        driver += load.workers
    return RolloutLoad(
        workers=workers,
        requests_per_second=round(traffic.requests, 3),
        rollouts_per_second=round(traffic.rollouts, 3),
        tokens_per_answer=round(traffic.sampled / traffic.requests),
        driver=round(driver, 4),
        worker=round(worker, 4),
    )
