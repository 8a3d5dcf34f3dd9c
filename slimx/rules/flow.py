"""Rules about rollouts in flight, training batches and evaluation, of new rollouts or those saved by another run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.rollout import Eval, Rollout
from slimx.config.sections.run import RunSection
from slimx.config.sections.schedule import Schedule, batches_in_flight
from slimx.config.sections.trainer import Trainer

if TYPE_CHECKING:
    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


@rule("flow.window", "schedule.window")
def overtaking(rollout: Rollout, schedule: Schedule) -> Problems:
    stale = schedule.max_staleness
    window = schedule.window
    if window > stale:
        yield (
            f"{window} batches could overtake a group, which may be only {stale} versions old "
            "(schedule.max_staleness); lower window, or raise max_staleness"
        )
    elif window and batches_in_flight(rollout, schedule) <= 1:
        yield (
            f"with schedule.max_staleness {stale} only one batch is in flight (max_staleness + 1 - window), so nothing "
            "can overtake; raise max_staleness, or set rollout.over_sampling above 1"
        )


@rule("flow.request_deadline", "rollout.request_deadline")
def requests_outlast_detection(rollout: Rollout) -> Problems:
    health = rollout.health
    detection = health.threshold * (health.interval + health.timeout)
    if rollout.served and rollout.request_deadline <= detection:
        yield (
            f"a silent engine or router is detected after {detection:g} s (threshold x (interval + timeout) of "
            "rollout.health), when its requests have already failed; raise it above that, or lower one of these"
        )


@rule("flow.straggler_deadline", "schedule.straggler_deadline")
def stragglers(rollout: Rollout, schedule: Schedule) -> Problems:
    deadline = schedule.straggler_deadline
    if deadline is None:
        return
    if not rollout.sampled:
        yield "it applies to sampled groups, but rollout.engines is empty; leave it out"
    elif batches_in_flight(rollout, schedule) <= 1:
        yield (
            "a group is dropped when enough others have finished, which never happens with one batch in flight "
            f"(schedule.max_staleness {schedule.max_staleness}, rollout.over_sampling {rollout.over_sampling}); raise "
            "max_staleness, set over_sampling above 1, or leave it out"
        )
    elif deadline >= schedule.step_deadline:
        yield (
            f"it never takes effect, because schedule.step_deadline={schedule.step_deadline:g} ends the run first; "
            "lower it, or raise step_deadline"
        )


@rule("flow.partial", "rollout.partial")
def partial(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.partial and not schedule.max_staleness:
        yield "tokens of older versions need a schedule.max_staleness of 1 or more; raise it, or set partial to false"


@rule("flow.colocate", "schedule.colocate")
def colocated(rollout: Rollout, schedule: Schedule) -> Problems:
    if schedule.colocate and schedule.max_staleness and not rollout.partial:
        yield (
            "engines that sleep while trainers train cannot generate ahead (schedule.max_staleness); set one of the "
            "two to its default, or set rollout.partial=true, which keeps unfinished rollouts"
        )


@rule("flow.mask_stale_tokens", "algorithm.mask_stale_tokens")
def masked(algorithm: Algorithm, schedule: Schedule) -> Problems:
    if algorithm.mask_stale_tokens and not schedule.max_staleness:
        yield "with schedule.max_staleness=0 there are no tokens of older versions; leave it out"


@rule("flow.over_sampling", "rollout.over_sampling")
def over_sampled(rollout: Rollout) -> Problems:
    if rollout.over_sampling is not None and not rollout.policy_engines:
        yield "rollout.engines has no engines of the policy; leave it out"


@rule("flow.engines", "rollout.engines")
def has_engines_to_schedule(rollout: Rollout, schedule: Schedule) -> Problems:
    if not rollout.sampled and (schedule.max_staleness or schedule.colocate):
        yield "there are no engines, but schedule.max_staleness and schedule.colocate need some; add a group"


@rule("routes.engine", "trainer.moe.routing_replay")
def routes_of_engines(trainer: Trainer, rollout: Rollout) -> Problems:
    if trainer.moe.routing_replay == "R3" and not (rollout.sampled and rollout.routed_experts):
        missing = "rollout.routed_experts is false" if rollout.sampled else "rollout.engines is empty"
        yield f"{missing}, so engines return no routes; set rollout.routed_experts=true, or set it to none or R2"


@rule("eval.engines", "eval.prompts")
def evaluated(eval: Eval, rollout: Rollout, algorithm: Algorithm) -> Problems:
    if eval.files and not rollout.sampled and not algorithm.scores:
        yield "evaluation needs an engine, and rollout.engines is empty; add a group, or leave eval.prompts out"


@rule("eval.prompts", "eval.every")
def held_out(eval: Eval) -> Problems:
    if eval.every and not eval.prompts and "prompts" not in eval.model_fields_set:  # null, where given, says: none
        yield "there are no eval.prompts to evaluate; set a file, or set this to 0"


@rule("schedule.updates", "schedule.updates_per_step")
def whole_groups(schedule: Schedule, rollout: Rollout) -> Problems:
    if rollout.prompts_per_step % schedule.updates_per_step:
        yield (
            "updates need whole groups, but it does not divide rollout.prompts_per_step "
            f"{rollout.prompts_per_step}; change one of them"
        )


@rule("replay.colocate", "schedule.colocate")
def replays_apart(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.replay is not None and schedule.colocate:
        yield "with rollout.replay there are no engines to share devices with; set it to false"


@rule("replay.own_directory", "rollout.replay")
def another_run(rollout: Rollout, run: RunSection) -> Problems:
    if rollout.replay is not None and Path(rollout.replay).resolve() == Path(run.dir).resolve():
        yield f"it is run.dir itself ({run.dir}); set another run.dir for the replay"


UPDATE = "(rollout.prompts_per_step x rollout.group_size / schedule.updates_per_step)"


@rule("batch.positions", "rollout.max_prompt_tokens")
def has_positions(rollout: Rollout, spec: ModelSpec) -> Problems:
    positions = spec.gpt["max_sequence_length"]
    answer = rollout.sampling.max_new_tokens
    if rollout.longest > positions:
        yield f"with rollout.sampling.max_new_tokens={answer} it exceeds the model's {positions} positions; lower one"


@rule("batch.microbatch", "trainer.max_tokens_per_microbatch")
def fits_microbatch(rollout: Rollout, trainer: Trainer, sizes: Sizes) -> Problems:
    # n tokens have n - 1 positions, padded for context parallelism. Demonstrations may have any number.
    positions = sizes.packed_length(rollout.longest - 1)
    if rollout.policy_engines and positions > trainer.max_tokens_per_microbatch:
        yield (
            f"a rollout may have {rollout.longest} tokens (rollout.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens); set it to at least {positions}, or lower one of the others"
        )


@rule("batch.ranks", "trainer.data")
def feeds_trainers(rollout: Rollout, schedule: Schedule, sizes: Sizes) -> Problems:
    rows = update_rows(rollout, schedule)
    if rows < sizes.data:
        yield (
            f"an update of {rows} rollouts {UPDATE} cannot feed {sizes.data} data-parallel ranks; raise one of the "
            "first two, or lower the third or trainer.data"
        )


def update_rows(rollout: Rollout, schedule: Schedule) -> int:
    """Returns the number of rollouts per update."""
    return rollout.prompts_per_step * rollout.group_size // schedule.updates_per_step
