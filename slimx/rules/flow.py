"""Rules about rollouts in flight, training batches and evaluation, for new rollouts and for rollouts saved by another
run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.eval import Eval
from slimx.config.sections.general import RunSection, Schedule
from slimx.config.sections.rollout import Rollout, batches_in_flight
from slimx.config.sections.trainer import Trainer
from slimx.errors import counted

if TYPE_CHECKING:
    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


@rule("flow.window", "schedule.window")
def overtaking(rollout: Rollout, schedule: Schedule) -> Problems:
    stale = schedule.max_staleness
    window = schedule.window
    if window > stale:
        yield (
            f"schedule.window is {window}, more than schedule.max_staleness={stale}, so a group overtaken by "
            f"{window} batches would be too stale to train on; lower schedule.window, or raise schedule.max_staleness"
        )
    elif window and batches_in_flight(rollout, schedule) <= 1:
        yield (
            f"schedule.window is {window}, but with schedule.max_staleness={stale} only one batch is in flight "
            "(schedule.max_staleness + 1 - schedule.window), so no batch can overtake a group; raise "
            "schedule.max_staleness, or set rollout.over_sampling above 1"
        )


@rule("flow.request_deadline", "rollout.request_deadline")
def requests_outlast_detection(rollout: Rollout, served: ServedEngines) -> Problems:
    health = rollout.health
    detection = health.threshold * (health.interval + health.timeout)
    if served.groups and rollout.request_deadline <= detection:
        yield (
            f"rollout.request_deadline is {rollout.request_deadline:g} s, but an engine or router that does not "
            f"respond is detected only after {detection:g} s (threshold x (interval + timeout) of rollout.health); "
            f"raise rollout.request_deadline above {detection:g} s, or lower these settings of rollout.health"
        )


@rule("flow.straggler_deadline", "schedule.straggler_deadline")
def stragglers(rollout: Rollout, schedule: Schedule) -> Problems:
    deadline = schedule.straggler_deadline
    if deadline is None:
        return
    if not rollout.sampled:
        yield "schedule.straggler_deadline has no effect, because no engine samples rollouts; remove this setting"
    elif batches_in_flight(rollout, schedule) <= 1:
        yield (
            "schedule.straggler_deadline has no effect, because stragglers are dropped when enough other groups have "
            "finished, which never happens with one batch in flight (schedule.max_staleness "
            f"{schedule.max_staleness}, rollout.over_sampling {rollout.over_sampling}); raise schedule.max_staleness, "
            "set rollout.over_sampling above 1, or remove schedule.straggler_deadline"
        )
    elif deadline >= schedule.step_deadline:
        yield (
            f"schedule.straggler_deadline of {deadline:g} s has no effect, because schedule.step_deadline of "
            f"{schedule.step_deadline:g} s ends the run first; lower schedule.straggler_deadline, or raise "
            "schedule.step_deadline"
        )


@rule("flow.partial", "rollout.partial")
def partial(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.partial and not schedule.max_staleness:
        yield (
            "rollout.partial is true, but with schedule.max_staleness=0 no rollout can continue with newer weights; "
            "set schedule.max_staleness to at least 1, or rollout.partial=false"
        )


@rule("flow.colocate", "schedule.colocate")
def colocated(rollout: Rollout, schedule: Schedule) -> Problems:
    if schedule.colocate and schedule.max_staleness and not rollout.partial:
        yield (
            "schedule.colocate is true, so engines sleep while trainers run and cannot generate ahead as "
            f"schedule.max_staleness={schedule.max_staleness} allows; set schedule.colocate=false, "
            "schedule.max_staleness=0, or rollout.partial=true, which keeps unfinished rollouts"
        )


@rule("flow.mask_stale_tokens", "algorithm.mask_stale_tokens")
def masked(algorithm: Algorithm, schedule: Schedule) -> Problems:
    if algorithm.mask_stale_tokens and not schedule.max_staleness:
        yield (
            "algorithm.mask_stale_tokens has no effect, because with schedule.max_staleness=0 no token is stale; "
            "remove algorithm.mask_stale_tokens"
        )


@rule("flow.over_sampling", "rollout.over_sampling")
def over_sampled(rollout: Rollout, served: ServedEngines) -> Problems:
    if rollout.over_sampling is not None and not served.policy:
        yield "rollout.over_sampling has no effect, because no engine serves the policy; remove rollout.over_sampling"


@rule("flow.engines", "rollout.engines")
def has_engines_to_schedule(rollout: Rollout, schedule: Schedule) -> Problems:
    if not rollout.sampled and (schedule.max_staleness or schedule.colocate):
        setting = "max_staleness above 0" if schedule.max_staleness else "colocate=true"
        yield f"schedule.{setting} needs engines that serve the policy; add a group to rollout.engines"


@rule("routes.engine", "trainer.moe.routing_replay")
def routes_of_engines(trainer: Trainer, rollout: Rollout) -> Problems:
    if trainer.moe.routing_replay == "R3" and not (rollout.sampled and rollout.routed_experts):
        missing = "rollout.routed_experts is false" if rollout.sampled else "no engine serves the policy"
        yield (
            f"trainer.moe.routing_replay is R3, but {missing}, so no engine returns the experts of tokens; use engines "
            "with rollout.routed_experts=true, or set trainer.moe.routing_replay to none or R2"
        )


@rule("eval.engines", "eval.prompts")
def evaluated(eval: Eval, rollout: Rollout, algorithm: Algorithm) -> Problems:
    if eval.files and not rollout.sampled and not algorithm.scores:
        yield "eval.prompts needs engines that serve the policy; add a group to rollout.engines, or remove eval.prompts"


@rule("eval.prompts", "eval.every")
def held_out(eval: Eval) -> Problems:
    if eval.every and not eval.prompts and "prompts" not in eval.model_fields_set:  # null: no evaluation
        yield f"eval.every is {eval.every}, but eval.prompts is missing; set eval.prompts to a file, or eval.every=0"


@rule("schedule.updates", "schedule.updates_per_step")
def whole_groups(schedule: Schedule, rollout: Rollout) -> Problems:
    if rollout.prompts_per_step % schedule.updates_per_step:
        yield (
            f"schedule.updates_per_step is {schedule.updates_per_step}, which does not divide "
            f"rollout.prompts_per_step={rollout.prompts_per_step}, but every update needs whole groups; set "
            "schedule.updates_per_step to a divisor of rollout.prompts_per_step"
        )


@rule("replay.colocate", "schedule.colocate")
def replays_apart(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.replay is not None and schedule.colocate:
        yield "schedule.colocate is true, but a run with rollout.replay has no engines; set schedule.colocate=false"


@rule("replay.own_directory", "rollout.replay")
def another_run(rollout: Rollout, run: RunSection) -> Problems:
    if rollout.replay is not None and Path(rollout.replay).resolve() == Path(run.dir).resolve():
        yield f"rollout.replay is the same directory as run.dir ({run.dir}); set run.dir to another directory"


UPDATE = "(rollout.prompts_per_step x rollout.group_size / schedule.updates_per_step)"


@rule("batch.positions", "rollout.max_prompt_tokens")
def has_positions(rollout: Rollout, spec: ModelSpec) -> Problems:
    positions = spec.gpt["max_sequence_length"]
    answer = rollout.sampling.max_new_tokens
    if rollout.longest > positions:
        yield (
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and rollout.sampling.max_new_tokens={answer} "
            f"together exceed the model's {positions} positions; lower one of these settings"
        )


@rule("batch.microbatch", "trainer.max_tokens_per_microbatch")
def fits_microbatch(rollout: Rollout, served: ServedEngines, trainer: Trainer, sizes: Sizes) -> Problems:
    # n tokens have n - 1 trained positions, padded for context parallelism. Demonstrations can have any length.
    positions = sizes.packed_length(rollout.longest - 1)
    if served.policy and positions > trainer.max_tokens_per_microbatch:
        yield (
            f"trainer.max_tokens_per_microbatch is {trainer.max_tokens_per_microbatch}, but a rollout may have "
            f"{rollout.longest} tokens (rollout.max_prompt_tokens + rollout.sampling.max_new_tokens), the first "
            f"untrained; set trainer.max_tokens_per_microbatch to at least {positions}, or lower "
            "rollout.max_prompt_tokens or rollout.sampling.max_new_tokens"
        )


@rule("batch.ranks", "trainer.data")
def feeds_trainers(rollout: Rollout, schedule: Schedule, sizes: Sizes) -> Problems:
    rows = update_rows(rollout, schedule)
    if rows < sizes.data:
        yield (
            f"an update has {counted(rows, 'rollout')} {UPDATE}, fewer than the "
            f"{counted(sizes.data, 'data-parallel rank')}; raise rollout.prompts_per_step or rollout.group_size, or "
            "lower schedule.updates_per_step or trainer.data"
        )


def update_rows(rollout: Rollout, schedule: Schedule) -> int:
    """Returns the number of rollouts per optimizer update."""
    return rollout.prompts_per_step * rollout.group_size // schedule.updates_per_step
