"""How many groups are in flight, and whether the keys that say so fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.algorithm import Algorithm
from slimx.config.rollout import Rollout
from slimx.config.schedule import Schedule


def batches_in_flight(rollout: Rollout, schedule: Schedule) -> float:
    """Groups that are open while a step waits for its own, over `rollout.prompts_per_step`."""
    return rollout.over_sampling or float(max(1, schedule.max_staleness + 1 - schedule.window))


def flow_problems(rollout: Rollout, schedule: Schedule, algorithm: Algorithm) -> Iterator[str]:
    """What does not fit, a sentence each."""
    stale, window = schedule.max_staleness, schedule.window
    if window > stale:
        yield (
            f"schedule.window {window} lets a group be overtaken by {window} batches, and schedule.max_staleness "
            f"{stale} lets it be {stale} versions old: lower window, or raise max_staleness"
        )
    elif window and batches_in_flight(rollout, schedule) <= 1:
        yield (
            f"schedule.window {window} with schedule.max_staleness {stale} leaves one batch in flight (max_staleness + "
            "1 - window), and nothing could overtake; raise max_staleness, or set rollout.over_sampling above 1"
        )
    if schedule.straggler_deadline is not None and not rollout.sampled:
        yield "schedule.straggler_deadline gives up what engines sample, and rollout.engines has none; leave it out"
    elif schedule.straggler_deadline is not None and batches_in_flight(rollout, schedule) <= 1:
        yield (
            "schedule.straggler_deadline gives a group up when enough others are done, and with one batch in flight "
            f"(schedule.max_staleness {stale}, rollout.over_sampling {rollout.over_sampling}) they never are; raise "
            "max_staleness, set over_sampling above 1, or leave it out"
        )
    elif schedule.straggler_deadline is not None and schedule.straggler_deadline >= schedule.step_deadline:
        yield (
            f"schedule.straggler_deadline {schedule.straggler_deadline:g} would never pass, as schedule.step_deadline "
            f"{schedule.step_deadline:g} ends the run before; lower it, or raise step_deadline"
        )
    if rollout.partial and not stale:
        yield (
            "rollout.partial trains tokens of older versions, and schedule.max_staleness is 0: set max_staleness to 1 "
            "or more, or rollout.partial=false"
        )
    if schedule.colocate and stale and not rollout.partial:
        yield (
            "schedule.colocate and schedule.max_staleness exclude each other, since engines that sleep while trainers "
            "train cannot generate ahead; set one of them to its default, or rollout.partial=true, which keeps "
            "unfinished rollouts meanwhile"
        )
    if algorithm.mask_stale_tokens and not stale:
        yield (
            "algorithm.mask_stale_tokens masks tokens of older versions, and schedule.max_staleness is 0: there are "
            "none; leave it out"
        )
    if rollout.over_sampling is not None and not rollout.policy_engines:
        yield "rollout.over_sampling needs engines, and rollout.engines has none of the policy; leave it out"
