"""Rules about the engines, rewards, groups, teachers and credit assignment that an algorithm needs."""

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
        yield (
            f"algorithm.name={algorithm.name} trains on rollouts, but no group in rollout.engines serves the policy; "
            "add an engine group with frozen=false, or set algorithm.name=sft"
        )


@rule("algorithm.reward", "reward.function")
def has_rewards(algorithm: Algorithm, reward: Reward) -> Problems:
    if not _demonstrated(algorithm) and algorithm.advantages.kind != "none" and not reward.configured:
        yield (
            f"algorithm.name={algorithm.name} needs rewards, but reward.function is null; set reward.function to a "
            "reward hook"
        )


@rule("algorithm.group_size", "rollout.group_size")
def has_groups(algorithm: Algorithm, rollout: Rollout) -> Problems:
    if algorithm.compares and rollout.group_size == 1:
        yield (
            f"algorithm.advantages={algorithm.advantages} compares the rollouts of a prompt, so every advantage would "
            "be 0 with rollout.group_size=1; set rollout.group_size to at least 2"
        )


@rule("algorithm.greedy", "rollout.sampling")
def samples_differ(algorithm: Algorithm, rollout: Rollout) -> Problems:
    compared = algorithm.compares or algorithm.advantages.kind == "remax"  # remax: a greedy baseline
    if not compared or not rollout.sampled:
        return
    for key in rollout.sampling.greedy:
        default = Sampling.model_fields[key].default
        yield (
            f"rollout.sampling.{key}",
            f"rollout.sampling.{key} makes all answers to a prompt equal, so every advantage by "
            f"algorithm.advantages={algorithm.advantages} would be 0; set rollout.sampling.{key}={default:g} "
            "(for greedy evaluation see eval.temperature)",
        )


@rule("teacher.architecture", "algorithm.teacher")
def same_architecture(spec: ModelSpec, teacher_weights: Path | None) -> Problems:
    """Requires the teacher to have the policy's architecture: the same tensors by name and shape, and equal fields of
    Megatron's configuration (norm epsilon, rope base, experts per token, ...), except the maximum sequence length."""
    if teacher_weights is None:
        return
    from slimx.models.families import read_model
    from slimx.models.files.reader import CheckpointReader  # it imports torch, which `slimx plan` does not need

    path = str(teacher_weights)
    teacher = read_model(path, mtp_layers=spec.table.mtp_layers, family=spec.family)
    policy_fields = spec.transformer | spec.gpt
    teacher_fields = teacher.transformer | teacher.gpt
    for field in sorted((policy_fields.keys() | teacher_fields.keys()) - {"max_sequence_length"}):
        if policy_fields.get(field) != teacher_fields.get(field):
            yield (
                f"algorithm.teacher {path} has {field} {teacher_fields.get(field)}, not {policy_fields.get(field)} "
                f"like the policy {spec.path}; set algorithm.teacher to a model of the policy's architecture"
            )
            return
    CheckpointReader(path).check(spec.table)


@rule("policies.shared_credit", "algorithm.credit")
def credit_matters(policies: Mapping[str, Policy], algorithm: Algorithm) -> Problems:
    """Rejects shared credit if advantages compare the mean rewards of rollouts, which shared credit does not change."""
    alone = all(policy.shares is not None for policy in policies.values())
    if algorithm.credit == "shared" and alone and algorithm.advantages.kind in ("grpo", "gpg", "rloo", "opo"):
        yield (
            "algorithm.credit=shared has no effect with one trained policy and "
            f"algorithm.advantages={algorithm.advantages}, which compares the mean rewards of rollouts; remove "
            "algorithm.credit, or set algorithm.advantages to reinforce, reinforce_baseline or gae, which use the "
            "reward of each trajectory"
        )
