"""Rules about the algorithm: the engines, rewards, groups, teachers and credit that it needs."""

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
def has_engines(algorithm: Algorithm, rollout: Rollout) -> Problems:
    if not _demonstrated(algorithm) and not rollout.sampled and not rollout.replay:
        yield f"no group samples, but algorithm.name={algorithm.name} trains on rollouts; add a group, or use sft"


@rule("algorithm.reward", "reward.function")
def has_rewards(algorithm: Algorithm, reward: Reward) -> Problems:
    if not _demonstrated(algorithm) and algorithm.advantages.kind != "none" and not reward.configured:
        yield f"algorithm.name={algorithm.name} needs rewards, but no hook is set; set a reward hook"


@rule("algorithm.group_size", "rollout.group_size")
def has_groups(algorithm: Algorithm, rollout: Rollout) -> Problems:
    if algorithm.compares and rollout.group_size == 1:
        yield (
            f"algorithm.advantages={algorithm.advantages} compares the rollouts of a prompt, so every advantage would "
            "be 0; raise it"
        )


@rule("algorithm.greedy", "rollout.sampling")
def samples_differ(algorithm: Algorithm, rollout: Rollout) -> Problems:
    compared = algorithm.compares or algorithm.advantages.kind == "remax"  # remax compares with the greedy answer
    if not compared or not rollout.sampled:
        return
    for key in rollout.sampling.greedy:
        default = Sampling.model_fields[key].default
        yield (
            f"rollout.sampling.{key}",
            f"all answers to a prompt would be the same, and algorithm.advantages={algorithm.advantages} compares "
            f"them: every advantage would be 0; set it to {default:g} (evaluation is greedy by default, "
            "eval.temperature)",
        )


@rule("teacher.architecture", "algorithm.teacher")
def same_architecture(spec: ModelSpec, teacher_weights: Path | None) -> Problems:
    """Compares tensors by name and shape. Other properties (norm epsilon, rope base, experts per token) are compared in
    Megatron's configurations of both models, except the maximum sequence length."""
    if teacher_weights is None:
        return
    from slimx.models.families import read_model
    from slimx.models.files.reader import CheckpointReader  # it imports torch, which a plan does without

    path = str(teacher_weights)
    teacher = read_model(path, mtp_layers=spec.table.mtp_layers, family=spec.family)
    policy_fields = spec.transformer | spec.gpt
    teacher_fields = teacher.transformer | teacher.gpt
    for field in sorted((policy_fields.keys() | teacher_fields.keys()) - {"max_sequence_length"}):
        if policy_fields.get(field) != teacher_fields.get(field):
            yield (
                f"algorithm.teacher {path} does not have the architecture of {spec.path}, whose memory its weights "
                f"share: {field} is {teacher_fields.get(field)}, not {policy_fields.get(field)}; use a "
                "teacher of the same architecture"
            )
            return
    CheckpointReader(path).check(spec.table)


@rule("policies.shared_credit", "algorithm.credit")
def credit_matters(policies: Mapping[str, Policy], algorithm: Algorithm) -> Problems:
    """Refuses shared credit if advantages compare the mean rewards of rollouts, which it does not change."""
    alone = all(policy.shares is not None for policy in policies.values())
    if algorithm.credit == "shared" and alone and algorithm.advantages.kind in ("grpo", "gpg", "rloo", "opo"):
        yield (
            f"advantages by {algorithm.advantages} compare the mean rewards of rollouts, so with one trained policy it "
            "has no effect; leave it out, or set algorithm.advantages to an estimator that uses each trajectory's "
            "reward (reinforce, reinforce_baseline, gae)"
        )
