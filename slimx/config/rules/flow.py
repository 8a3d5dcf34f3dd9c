"""Rules about how many groups are in flight, how old they may be, and what is given up."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.schedule import Schedule, batches_in_flight


@rule("flow.window", about="schedule.window")
def overtaking(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
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


@rule("flow.request_deadline", about="rollout.request_deadline")
def requests_outlast_detection(rollout: Rollout) -> Iterator[str]:
    health = rollout.health
    detection = health.threshold * (health.interval + health.timeout)
    if rollout.served and rollout.request_deadline <= detection:
        yield (
            f"rollout.request_deadline {rollout.request_deadline:g} passes before a silent engine or router is found, "
            f"which rollout.health allows {health.threshold} x ({health.interval:g} + {health.timeout:g}) = "
            f"{detection:g} s, so that its requests fail: raise request_deadline above that, or lower "
            "rollout.health.threshold, interval or timeout"
        )


@rule("flow.straggler_deadline", about="schedule.straggler_deadline")
def stragglers(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    deadline = schedule.straggler_deadline
    if deadline is None:
        return
    if not rollout.sampled:
        yield "schedule.straggler_deadline gives up what engines sample, and rollout.engines has none; leave it out"
    elif batches_in_flight(rollout, schedule) <= 1:
        yield (
            "schedule.straggler_deadline gives a group up when enough others are done, and with one batch in flight "
            f"(schedule.max_staleness {schedule.max_staleness}, rollout.over_sampling {rollout.over_sampling}) they "
            "never are; raise max_staleness, set over_sampling above 1, or leave it out"
        )
    elif deadline >= schedule.step_deadline:
        yield (
            f"schedule.straggler_deadline {deadline:g} would never pass, as schedule.step_deadline "
            f"{schedule.step_deadline:g} ends the run before; lower it, or raise step_deadline"
        )


@rule("flow.partial", about="rollout.partial")
def partial(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if rollout.partial and not schedule.max_staleness:
        yield (
            "rollout.partial trains tokens of older versions, and schedule.max_staleness is 0: set max_staleness to 1 "
            "or more, or rollout.partial=false"
        )


@rule("flow.colocate", about="schedule.colocate")
def colocated(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if schedule.colocate and schedule.max_staleness and not rollout.partial:
        yield (
            "schedule.colocate and schedule.max_staleness exclude each other, since engines that sleep while trainers "
            "train cannot generate ahead; set one of them to its default, or rollout.partial=true, which keeps "
            "unfinished rollouts meanwhile"
        )


@rule("flow.mask_stale_tokens", about="algorithm.mask_stale_tokens")
def masked(algorithm: Algorithm, schedule: Schedule) -> Iterator[str]:
    if algorithm.mask_stale_tokens and not schedule.max_staleness:
        yield (
            "algorithm.mask_stale_tokens masks tokens of older versions, and schedule.max_staleness is 0: there are "
            "none; leave it out"
        )


@rule("flow.over_sampling", about="rollout.over_sampling")
def over_sampled(rollout: Rollout) -> Iterator[str]:
    if rollout.over_sampling is not None and not rollout.policy_engines:
        yield "rollout.over_sampling needs engines, and rollout.engines has none of the policy; leave it out"


@rule("flow.engines", about="rollout.engines")
def ahead_of_what(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if not rollout.sampled and (schedule.max_staleness or schedule.colocate):
        yield "schedule.max_staleness and schedule.colocate need engines; rollout.engines is empty"
