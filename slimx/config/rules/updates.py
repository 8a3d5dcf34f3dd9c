"""Rules about what a step trains and evaluates (this run's rollouts, or those that another one saved), and the weights
that it publishes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimx.config.rule import rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Eval, Rollout
from slimx.config.sections.run import Numerics, RunSection
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer


@rule("routes.engine", about="trainer.moe.routing_replay")
def routes_of_engines(trainer: Trainer, rollout: Rollout) -> Iterator[str]:
    if trainer.moe.routing_replay == "R3" and not (rollout.sampled and rollout.routed_experts):
        missing = "rollout.routed_experts is false" if rollout.sampled else "rollout.engines is empty"
        yield (
            f"trainer.moe.routing_replay is R3 but {missing}: there are no routes of an engine to replay; set "
            "rollout.routed_experts=true, or trainer.moe.routing_replay=none or R2"
        )


@rule("eval.engines", about="eval.prompts")
def evaluated(eval: Eval, rollout: Rollout, algorithm: Algorithm) -> Iterator[str]:
    if eval.files and not rollout.sampled and not algorithm.scores:
        yield "eval.prompts is set but rollout.engines is empty; evaluation needs an engine"


@rule("eval.prompts", about="eval.every")
def held_out(eval: Eval) -> Iterator[str]:
    if eval.every and not eval.prompts and "prompts" not in eval.model_fields_set:  # null, where given, says: none
        yield (
            f"eval.every is {eval.every}, but there are no eval.prompts: nothing would be evaluated; name a file, or "
            "set eval.every=0"
        )


@rule("schedule.updates", about="schedule.updates_per_step")
def whole_groups(schedule: Schedule, rollout: Rollout) -> Iterator[str]:
    if rollout.prompts_per_step % schedule.updates_per_step:
        yield (
            f"schedule.updates_per_step {schedule.updates_per_step} does not divide rollout.prompts_per_step "
            f"{rollout.prompts_per_step}: an update trains whole groups; change one of them"
        )


@rule("publish.triton_dtype", about="publish.quantise")
def rounded_from(publish: Publish, numerics: Numerics) -> Iterator[str]:
    if publish.quantise == "triton" and numerics.dtype == "float32":
        yield (
            "publish.quantise=triton is defined for bfloat16 weights, and numerics.dtype is float32; set it to "
            "bfloat16, or publish.quantise=ieee"
        )


@rule("replay.colocate", about="schedule.colocate")
def no_turns(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if rollout.replay is not None and schedule.colocate:
        yield (
            "rollout.replay and schedule.colocate exclude each other: a replay has no engines to take turns with; set "
            "schedule.colocate=false"
        )


@rule("replay.own_directory", about="rollout.replay")
def another_run(rollout: Rollout, run: RunSection) -> Iterator[str]:
    if rollout.replay is not None and Path(rollout.replay).resolve() == Path(run.dir).resolve():
        yield f"rollout.replay is run.dir itself ({run.dir}); choose another run.dir for what is trained again"
