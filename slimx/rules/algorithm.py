"""Rules about the algorithm: rewards, pairs, teachers and credit that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.policies import Policy
from slimx.config.sections.reward import Reward
from slimx.config.sections.rollout import Rollout, Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from slimx.models.families import ModelSpec


def _demonstrated(algorithm: Algorithm) -> bool:
    return algorithm.loss.demonstrated or algorithm.advantages.demonstrated


@rule("algorithm.engines", "rollout.engines")
def engines(algorithm: Algorithm, rollout: Rollout) -> Problems:
    if not _demonstrated(algorithm) and not rollout.sampled and not rollout.replay:
        yield f"no group samples, and algorithm.name={algorithm.name} trains rollouts; add an engine group, or use sft"


@rule("algorithm.reward", "reward.function")
def rewarded(algorithm: Algorithm, reward: Reward) -> Problems:
    if not _demonstrated(algorithm) and algorithm.advantages.kind != "none" and not reward.configured:
        yield f"algorithm.name={algorithm.name} needs rewards, and there are none; name a reward hook"


@rule("algorithm.group_size", "rollout.group_size")
def compared(algorithm: Algorithm, rollout: Rollout) -> Problems:
    if algorithm.compares and rollout.group_size == 1:
        yield (
            f"algorithm.advantages={algorithm.advantages} compares the rollouts of a prompt, and every advantage would "
            "be 0; raise it"
        )


@rule("algorithm.greedy", "rollout.sampling")
def varied(algorithm: Algorithm, rollout: Rollout) -> Problems:
    compared = algorithm.compares or algorithm.advantages.kind == "remax"  # remax: with the greedy answer itself
    if not compared or not rollout.sampled:
        return
    for key in rollout.sampling.greedy:
        default = Sampling.model_fields[key].default
        yield (
            f"rollout.sampling.{key}",
            f"all answers to a prompt are the same, and algorithm.advantages={algorithm.advantages} compares them: "
            f"every advantage would be 0; set it to {default:g} (held-out answers are greedy by themselves, "
            "eval.temperature)",
        )


@rule("teacher.architecture", "algorithm.teacher")
def same_architecture(spec: ModelSpec, teacher_weights: Path | None) -> Problems:
    """Tensors are compared by name and shape, and what they do not show (norm's epsilon, rope's base, experts per
    token) by Megatron's configuration of both. How long a sequence may be is not compared."""
    if teacher_weights is None:
        return
    from slimx.models.families import read_model
    from slimx.models.files.reader import CheckpointReader  # it imports torch, which a plan does without

    path = str(teacher_weights)
    teacher = read_model(path, mtp_layers=spec.table.mtp_layers, family=spec.family)
    here, there = spec.transformer | spec.gpt, teacher.transformer | teacher.gpt
    for field in sorted((here.keys() | there.keys()) - {"max_sequence_length"}):
        if here.get(field) != there.get(field):
            yield (
                f"algorithm.teacher {path} is not of the architecture of {spec.path}, in whose memory its weights take "
                f"turns: {field} is {there.get(field)}, not {here.get(field)}; use one of the same sizes"
            )
            return
    CheckpointReader(path).check(spec.table)


@rule("policies.shared_credit", "algorithm.credit")
def divides(policies: Mapping[str, Policy], algorithm: Algorithm) -> Problems:
    """The mean of a rollout's rewards does not change where each trajectory has it."""
    alone = all(policy.shares is not None for policy in policies.values())
    if algorithm.credit == "shared" and alone and algorithm.advantages.kind in ("grpo", "gpg", "rloo", "opo"):
        yield (
            f"advantages by {algorithm.advantages} compare rollouts by the mean reward of their trajectories, and one "
            "policy is trained: nothing changes; leave it out, or set algorithm.advantages to one that takes each "
            "trajectory's reward (reinforce, reinforce_baseline, gae)"
        )
