"""Losses as pure functions of per-token tensors; the caller's weights hold the global denominator."""

from __future__ import annotations

import torch

from slimx.algorithms.inputs import Loss, LossInputs
from slimx.algorithms.losses.corrections import Correction, Rejection, off_policy_sequences
from slimx.algorithms.losses.kl import Estimator, k3
from slimx.algorithms.losses.ratios import bounded_ratio
from slimx.algorithms.losses.surrogates import LossTokens, Surrogate
from slimx.algorithms.losses.top_kl import TopKL, reverse


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy of the demonstrated tokens."""
    loss = -(inputs.weight * inputs.logprobs).sum()
    return loss, {"loss/sft": loss.detach()}


def policy_loss(
    surrogate: Surrogate,
    *,
    kl_coef: float = 0.0,
    kl: Estimator = k3,
    kl_unbiased: bool = False,
    entropy_coef: float = 0.0,
    teacher_coef: float = 0.0,
    teacher_kl_coef: float = 0.0,
    teacher_kl: TopKL = reverse,
    correction: Correction | None = None,
    rejection: Rejection | None = None,
    opsm_delta: float | None = None,
) -> Loss:
    """-(surrogate) + kl_coef KL(policy || reference) - entropy_coef entropy + teacher_kl_coef KL with the teacher.

    `kl_unbiased`: the estimate times policy / old, whose gradient has the KL's gradient as its mean also where others
    sampled (DeepSeek-V3.2, 2512.02556). `teacher_coef`: so much of log teacher - log engine is added to each token's
    advantage, a single-sample reverse KL (on-policy distillation, thinkingmachines.ai/blog/on-policy-distillation).
    `teacher_kl_coef`: so much of `teacher_kl` (`slimx.algorithms.losses.top_kl`) is added at each token, whatever its
    advantage or ratio (2306.13649, section 3.2, which does not differentiate through the sampling either).
    `correction` weighs the surrogate, and `rejection` and `opsm_delta` (`off_policy_sequences`) say at which tokens it
    counts at all; the other terms keep every token."""

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight, trained = inputs.weight, inputs.weight > 0
        # Outside the trained tokens log-probs mean nothing: a ratio there could overflow and 0 * inf is NaN.
        log_ratio = torch.where(trained, inputs.logprobs - inputs.old_logprobs, 0.0)
        tokens = LossTokens(
            logprobs=torch.where(trained, inputs.logprobs, 0.0),
            log_ratio=log_ratio,
            advantages=_advantages(inputs, trained, teacher_coef),
            trained=trained,
            columns=inputs,
            sequence_sum=inputs.sequence_sum or _one_sequence,
        )
        objective, held = surrogate(tokens)
        weights, metrics = weight, {}
        gap = inputs.old_logprobs - inputs.rollout_logprobs
        if correction is not None:
            factor, outside = correction(gap, trained, tokens.sequence_sum)
            weights = weight * factor
            metrics = {"correction/weight": weights.sum(), "correction/outside": (weight * outside).sum()}
        if rejection is not None:
            rejected = rejection(gap, trained, tokens.sequence_sum)
            weights = torch.where(rejected, 0.0, weights)
            metrics["rejection/share"] = (weight * rejected).sum()
        if opsm_delta is not None:
            drift = inputs.logprobs - inputs.rollout_logprobs
            masked = off_policy_sequences(drift, tokens.advantages, trained, tokens.sequence_sum, delta=opsm_delta)
            weights = torch.where(masked, 0.0, weights)
            metrics["opsm/share"] = (weight * masked).sum()
        total = policy = -(weights * objective).sum()
        with torch.no_grad():
            metrics |= {
                "loss/policy": policy.detach(),
                "loss/clip_fraction": (weight * (held & trained)).sum(),
                "kl/rollout": (weight * kl_from_rollout(inputs, trained)).sum(),
            }
            if inputs.entropy is not None:
                metrics["policy/entropy"] = (weight * inputs.entropy).sum()
            if inputs.teacher_logprobs is not None:
                teacher = torch.where(trained, inputs.teacher_logprobs, 0.0)
                metrics["kl/teacher"] = (weight * k3(tokens.logprobs, teacher)).sum()
        if entropy_coef:
            total = total - entropy_coef * (weight * torch.where(trained, inputs.entropy, 0.0)).sum()
        if teacher_kl_coef:
            divergence = (weight * torch.where(trained, teacher_kl(inputs.top), 0.0)).sum()
            metrics["kl/teacher_top"] = divergence.detach()
            total = total + teacher_kl_coef * divergence
        if inputs.reference_logprobs is not None:
            reference = torch.where(trained, inputs.reference_logprobs, 0.0)
            with torch.no_grad():
                metrics["kl/reference"] = (weight * k3(tokens.logprobs, reference)).sum()
            if kl_coef:
                estimate = kl(tokens.logprobs, reference)
                penalty = (weight * (bounded_ratio(log_ratio) * estimate if kl_unbiased else estimate)).sum()
                metrics["loss/kl"] = penalty.detach()
                total = total + kl_coef * penalty
        return total, metrics

    return loss


def kl_from_rollout(inputs: LossInputs, trained: torch.Tensor) -> torch.Tensor:
    """KL(rollout || policy) per token: the tokens come from the rollout's policy, and k3 has its roles accordingly."""
    difference = torch.where(trained, inputs.logprobs - inputs.rollout_logprobs, 0.0)
    return k3(torch.zeros_like(difference), difference)


def _advantages(inputs: LossInputs, trained: torch.Tensor, teacher_coef: float) -> torch.Tensor:
    if not teacher_coef:
        return inputs.advantages
    difference = torch.where(trained, inputs.teacher_logprobs - inputs.rollout_logprobs, 0.0)
    return inputs.advantages + teacher_coef * difference


def _one_sequence(values: torch.Tensor) -> torch.Tensor:
    return values.sum().expand_as(values)
