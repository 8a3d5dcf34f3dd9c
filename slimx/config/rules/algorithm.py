"""Rules about what the algorithm needs of the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic, critic_trainer
from slimx.config.sections.reward import Reward
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer


def _demonstrated(algorithm: Algorithm) -> bool:
    return algorithm.loss.kind == "sft" or algorithm.scores or algorithm.advantages.kind == "dpo"


@rule("algorithm.engines", about="rollout.engines")
def engines(algorithm: Algorithm, rollout: Rollout) -> Iterator[str]:
    if not _demonstrated(algorithm) and not rollout.sampled and not rollout.replay:
        have = "holds frozen groups only" if rollout.engines else "is empty"
        yield f"algorithm.name is {algorithm.name} but rollout.engines {have}; add an engine group or use sft"


@rule("algorithm.reward", about="reward.function")
def rewarded(algorithm: Algorithm, reward: Reward) -> Iterator[str]:
    if not _demonstrated(algorithm) and algorithm.advantages.kind != "none" and not reward.given:
        yield f"algorithm.name is {algorithm.name} but reward.function is null; name a reward hook"


@rule("algorithm.critic", about="critic")
def has_critic(algorithm: Algorithm, critic: Critic | None) -> Iterator[Told]:
    name = algorithm.name
    if algorithm.advantages.kind == "gae" and critic is None:
        yield "algorithm.name", f"algorithm.name is {name}, which needs a critic; add a section `critic: {{}}`"
    if algorithm.advantages.kind != "gae" and critic is not None:
        yield f"critic is given but algorithm.name is {name}, which has none; remove it or use ppo"


@rule("algorithm.group_size", about="rollout.group_size")
def compared(algorithm: Algorithm, rollout: Rollout) -> Iterator[str]:
    if algorithm.compares and rollout.group_size == 1:
        yield (
            f"rollout.group_size is 1, but algorithm.name is {algorithm.name} (advantages {algorithm.advantages}), "
            "which compares the rollouts of a prompt: every advantage would be 0; raise it"
        )


@rule("algorithm.greedy", about="rollout.sampling")
def varied(algorithm: Algorithm, rollout: Rollout) -> Iterator[Told]:
    compared = algorithm.compares or algorithm.advantages.kind == "remax"  # remax: with the greedy answer itself
    if not compared or not rollout.sampled:
        return
    for key, value in rollout.sampling.greedy.items():
        yield (
            f"rollout.sampling.{key}",
            f"rollout.sampling.{key} is {value:g}, with which all answers to a prompt are the same, but algorithm.name "
            f"is {algorithm.name} (advantages {algorithm.advantages}), which compares them: every advantage would be "
            f"0; set it to {type(rollout.sampling).model_fields[key].default:g} (held-out answers are greedy by "
            "themselves, eval.temperature)",
        )


@rule("algorithm.dpo_pairs", about="rollout.group_size")
def pairs(algorithm: Algorithm, rollout: Rollout, reward: Reward) -> Iterator[str]:
    if algorithm.advantages.kind == "dpo" and not rollout.engines and (rollout.group_size != 2 or reward.given):
        yield (
            "algorithm.advantages is dpo without engines: pairs come from the prompt file, two rollouts each, and say "
            "themselves which is chosen; set rollout.group_size=2, reward.function=null and "
            "rollout.generate=preferences"
        )


@rule("algorithm.dpo_routes", about="trainer.moe.routing_replay")
def margin_before_routes(algorithm: Algorithm, trainer: Trainer) -> Iterator[str]:
    if algorithm.advantages.kind == "dpo" and trainer.moe.routing_replay != "none":
        yield (
            f"algorithm.advantages is dpo and trainer.moe.routing_replay {trainer.moe.routing_replay}: a pair's margin "
            "is measured before routes are replayed; set trainer.moe.routing_replay=none"
        )


@rule("algorithm.dpo_updates", about="schedule.updates_per_step")
def margin_before_updates(algorithm: Algorithm, schedule: Schedule) -> Iterator[str]:
    if algorithm.advantages.kind == "dpo" and schedule.updates_per_step > 1:
        yield (
            f"algorithm.advantages is dpo and schedule.updates_per_step {schedule.updates_per_step}: the margin of a "
            "pair is that of the weights before a step's first update; set it to 1, and rollout.prompts_per_step to "
            "what one update trains"
        )


@rule("critic.layout", about="critic.layout")
def critic_fits(trainer: Trainer, critic: Critic | None) -> Iterator[str]:
    if critic is not None:
        critic_trainer(trainer, critic)
    yield from ()


@rule("algorithm.teacher_engine", about="algorithm.teacher_engine")
def served_teacher(algorithm: Algorithm, rollout: Rollout) -> Iterator[Told]:
    if not algorithm.served_teachers:
        return
    frozen = [group.name for group in rollout.engines if group.frozen]
    named = {"algorithm.teacher_engine": algorithm.teacher_engine} if algorithm.teacher_engine is not None else {}
    named |= {f"algorithm.teacher_engines.{value}": name for value, name in algorithm.teacher_engines.items()}
    missing = {key: name for key, name in named.items() if name not in frozen}
    for key, name in missing.items():
        have = f"the frozen groups of rollout.engines are {', '.join(frozen)}" if frozen else "no group is frozen"
        yield (
            key,
            f"{key} is {name}, and {have}; add a group with this name, frozen: true and the teacher's model to "
            "rollout.engines",
        )
    if missing:
        return
    given = "algorithm.teacher_engine" if algorithm.teacher_engine is not None else "algorithm.teacher_engines"
    for key, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", -1)):
        value = getattr(rollout.sampling, key)
        if value != neutral:
            yield (
                given,
                f"{given} with rollout.sampling.{key}={value:g}: SGLang scores given tokens at "
                f"temperature 1 over the whole vocabulary; set {key} to {neutral:g}, or algorithm.teacher, which "
                "trainers score as the policy samples",
            )
