"""Rules about what a step has in flight, trains and evaluates: this run's rollouts, or those that another one saved."""

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
    stale, window = schedule.max_staleness, schedule.window
    if window > stale:
        yield (
            f"a group could be overtaken by {window} batches and be {stale} versions old (schedule.max_staleness): "
            "lower window, or raise max_staleness"
        )
    elif window and batches_in_flight(rollout, schedule) <= 1:
        yield (
            f"with schedule.max_staleness {stale} one batch is in flight (max_staleness + 1 - window), and nothing "
            "could overtake; raise max_staleness, or set rollout.over_sampling above 1"
        )


@rule("flow.request_deadline", "rollout.request_deadline")
def requests_outlast_detection(rollout: Rollout) -> Problems:
    health = rollout.health
    detection = health.threshold * (health.interval + health.timeout)
    if rollout.served and rollout.request_deadline <= detection:
        yield (
            f"a silent engine or router is found after {detection:g} s (threshold x (interval + timeout) of "
            "rollout.health), and its requests would have failed; raise it above that, or lower one of these"
        )


@rule("flow.straggler_deadline", "schedule.straggler_deadline")
def stragglers(rollout: Rollout, schedule: Schedule) -> Problems:
    deadline = schedule.straggler_deadline
    if deadline is None:
        return
    if not rollout.sampled:
        yield "it gives up what engines sample, and rollout.engines has none; leave it out"
    elif batches_in_flight(rollout, schedule) <= 1:
        yield (
            "a group is given up when enough others are done, which they never are with one batch in flight "
            f"(schedule.max_staleness {schedule.max_staleness}, rollout.over_sampling {rollout.over_sampling}); raise "
            "max_staleness, set over_sampling above 1, or leave it out"
        )
    elif deadline >= schedule.step_deadline:
        yield (
            f"it would never pass, as schedule.step_deadline={schedule.step_deadline:g} ends the run before; lower it, "
            "or raise step_deadline"
        )


@rule("flow.partial", "rollout.partial")
def partial(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.partial and not schedule.max_staleness:
        yield "tokens of older versions need schedule.max_staleness of 1 or more; raise it, or set partial to false"


@rule("flow.colocate", "schedule.colocate")
def colocated(rollout: Rollout, schedule: Schedule) -> Problems:
    if schedule.colocate and schedule.max_staleness and not rollout.partial:
        yield (
            "engines that sleep while trainers train cannot generate ahead (schedule.max_staleness); set one of them "
            "to its default, or rollout.partial=true, which keeps unfinished rollouts meanwhile"
        )


@rule("flow.mask_stale_tokens", "algorithm.mask_stale_tokens")
def masked(algorithm: Algorithm, schedule: Schedule) -> Problems:
    if algorithm.mask_stale_tokens and not schedule.max_staleness:
        yield "with schedule.max_staleness=0 there are no tokens of older versions; leave it out"


@rule("flow.over_sampling", "rollout.over_sampling")
def over_sampled(rollout: Rollout) -> Problems:
    if rollout.over_sampling is not None and not rollout.policy_engines:
        yield "rollout.engines has no engine of the policy; leave it out"


@rule("flow.engines", "rollout.engines")
def ahead_of_what(rollout: Rollout, schedule: Schedule) -> Problems:
    if not rollout.sampled and (schedule.max_staleness or schedule.colocate):
        yield "there are none, and schedule.max_staleness and schedule.colocate need some; add a group"


@rule("routes.engine", "trainer.moe.routing_replay")
def routes_of_engines(trainer: Trainer, rollout: Rollout) -> Problems:
    if trainer.moe.routing_replay == "R3" and not (rollout.sampled and rollout.routed_experts):
        missing = "rollout.routed_experts is false" if rollout.sampled else "rollout.engines is empty"
        yield f"{missing}, so no engine's routes come; set rollout.routed_experts=true, or routing_replay to none or R2"


@rule("eval.engines", "eval.prompts")
def evaluated(eval: Eval, rollout: Rollout, algorithm: Algorithm) -> Problems:
    if eval.files and not rollout.sampled and not algorithm.scores:
        yield "evaluation needs an engine, and rollout.engines is empty; add a group, or leave eval.prompts out"


@rule("eval.prompts", "eval.every")
def held_out(eval: Eval) -> Problems:
    if eval.every and not eval.prompts and "prompts" not in eval.model_fields_set:  # null, where given, says: none
        yield "there are no eval.prompts: nothing would be evaluated; name a file, or set it to 0"


@rule("schedule.updates", "schedule.updates_per_step")
def whole_groups(schedule: Schedule, rollout: Rollout) -> Problems:
    if rollout.prompts_per_step % schedule.updates_per_step:
        yield (
            f"an update trains whole groups, and it does not divide rollout.prompts_per_step "
            f"{rollout.prompts_per_step}; change one of them"
        )


@rule("replay.colocate", "schedule.colocate")
def no_turns(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.replay is not None and schedule.colocate:
        yield "rollout.replay has no engines to take turns with; set it to false"


@rule("replay.own_directory", "rollout.replay")
def another_run(rollout: Rollout, run: RunSection) -> Problems:
    if rollout.replay is not None and Path(rollout.replay).resolve() == Path(run.dir).resolve():
        yield f"it is run.dir itself ({run.dir}); choose another run.dir for what is trained again"


UPDATE = "(rollout.prompts_per_step x rollout.group_size / schedule.updates_per_step)"


@rule("batch.positions", "rollout.max_prompt_tokens")
def has_positions(rollout: Rollout, spec: ModelSpec) -> Problems:
    positions, answer = spec.gpt["max_sequence_length"], rollout.sampling.max_new_tokens
    if rollout.longest > positions:
        yield f"with rollout.sampling.max_new_tokens={answer} it exceeds the model's {positions} positions; lower one"


@rule("batch.microbatch", "trainer.max_tokens_per_microbatch")
def fits_microbatch(rollout: Rollout, trainer: Trainer, sizes: Sizes) -> Problems:
    # A trajectory of n tokens has n - 1 positions, padded where context parallelism cuts it; demonstrations any number.
    positions = sizes.packed_length(rollout.longest - 1)
    if rollout.policy_engines and positions > trainer.max_tokens_per_microbatch:
        yield (
            f"a rollout may have {rollout.longest} tokens (rollout.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens); set it to {positions} at least, or lower one of the others"
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
    """Rollouts of an update."""
    return rollout.prompts_per_step * rollout.group_size // schedule.updates_per_step
