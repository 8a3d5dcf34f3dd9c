"""Losses as pure functions of per-token tensors; the caller's weights hold the global denominator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimx.algorithms.kl import k3


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token tensors of one micro-batch, each [T]; log-probs are of the label under softmax(logits / temperature),
    over the tokens that top-k and top-p kept when it was sampled."""

    logprobs: torch.Tensor
    """The policy's, with gradient."""
    weight: torch.Tensor
    """Loss weight; sums to 1 over all micro-batches and data-parallel ranks of an update; 0 where not trained."""
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    """What the ratio compares with: the engine's, or the trainer's own before the step (algorithm.old_logprobs)."""
    rollout_logprobs: torch.Tensor | None = None
    """The engine's; None: `old_logprobs` are."""
    reference_logprobs: torch.Tensor | None = None
    """Of the initial weights (algorithm.reference)."""
    teacher_logprobs: torch.Tensor | None = None
    """Of another checkpoint (algorithm.teacher)."""
    entropy: torch.Tensor | None = None
    """Of the distribution that each label is from, in nats, with gradient."""


Loss = Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's part of the loss (a sum, already weighted) and metrics that add up the same way."""


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy of the demonstrated tokens."""
    loss = -(inputs.weight * inputs.logprobs).sum()
    return loss, {"loss/sft": loss.detach()}


def policy_loss(*, clip_low: float, clip_high: float, kl_coef: float = 0.0) -> Loss:
    """PPO's clipped surrogate per token (1707.06347) with an asymmetric clip (DAPO, 2503.14476) and k3 KL to a
    reference."""

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight, trained = inputs.weight, inputs.weight > 0
        # Outside the trained tokens the old log-probs mean nothing: a ratio there could overflow and 0 * inf is NaN.
        difference = torch.where(trained, inputs.logprobs - inputs.old_logprobs, 0.0)
        ratio = difference.exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
        policy = -(weight * surrogate).sum()
        total = policy
        with torch.no_grad():
            metrics = {
                "loss/policy": policy.detach(),
                "loss/clip_fraction": (weight * (ratio * inputs.advantages > surrogate)).sum(),
                "kl/rollout": (weight * _kl_from_rollout(inputs, trained)).sum(),
            }
            if inputs.entropy is not None:
                metrics["policy/entropy"] = (weight * inputs.entropy).sum()
            if inputs.teacher_logprobs is not None:
                teacher = torch.where(trained, inputs.teacher_logprobs, inputs.logprobs)
                metrics["kl/teacher"] = (weight * k3(inputs.logprobs, teacher)).sum()
        if inputs.reference_logprobs is not None:
            reference = torch.where(trained, inputs.reference_logprobs, inputs.logprobs.detach())
            kl = (weight * k3(inputs.logprobs, reference)).sum()
            metrics["kl/reference"] = kl.detach()
            if kl_coef:
                total = total + kl_coef * kl
        return total, metrics

    return loss


def _kl_from_rollout(inputs: LossInputs, trained: torch.Tensor) -> torch.Tensor:
    """KL(rollout || policy) per token: the tokens come from the rollout's policy, and k3 has its roles accordingly."""
    rollout = inputs.old_logprobs if inputs.rollout_logprobs is None else inputs.rollout_logprobs
    difference = torch.where(trained, inputs.logprobs - rollout, 0.0)
    return k3(torch.zeros_like(difference), difference)
