"""The loss of the configured algorithm: a pure function of per-token tensors, whose weights have the denominators."""

from __future__ import annotations

from functools import partial

import torch

from slimx.algorithms.hooks import load_loss
from slimx.algorithms.inputs import Loss, LossInputs, bounded_ratio
from slimx.algorithms.losses import surrogates
from slimx.algorithms.losses.corrections import correction, off_policy_sequences, rejection
from slimx.algorithms.losses.kl import DIRECTIONS, ESTIMATORS, k3
from slimx.algorithms.losses.surrogates import LossTokens, Surrogate
from slimx.config.sections.algorithm import Algorithm


def make_loss(algorithm: Algorithm) -> Loss:
    """The loss function of a configured algorithm."""
    kind = algorithm.loss.kind
    if kind == "sft":
        return sft_loss
    if "loss" in algorithm.hooks:
        return load_loss(kind)
    surrogate = partial(getattr(surrogates, kind), **algorithm.loss.model_dump(exclude={"kind"}))
    return partial(policy_loss, surrogate=surrogate, algorithm=algorithm)


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy of the demonstrated tokens."""
    loss = -(inputs.weight * inputs.logprobs).sum()
    return loss, {"loss/sft": loss.detach()}


def policy_loss(
    inputs: LossInputs, surrogate: Surrogate, algorithm: Algorithm
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-(surrogate) + kl_coef KL(policy || reference) - entropy_coef entropy + teacher_kl_coef KL with the teacher, with
    the coefficients of `algorithm`.

    `kl_unbiased`: the estimate times policy / old, whose gradient has the KL's gradient as its mean also where others
    sampled (DeepSeek-V3.2, 2512.02556). `teacher_coef`: so much of log teacher - log engine is added to each token's
    advantage, a single-sample reverse KL (on-policy distillation, thinkingmachines.ai/blog/on-policy-distillation).
    `teacher_kl_coef`: so much of `teacher_kl` (`slimx.algorithms.losses.kl`) is added at each token, whatever its
    advantage or ratio (2306.13649, section 3.2, which does not differentiate through the sampling either).
    `correction` weighs the surrogate, and `rejection` and `opsm_delta` (`off_policy_sequences`) say at which tokens it
    counts at all; the other terms keep every token."""
    weight, trained = inputs.weight, inputs.weight > 0
    # Outside the trained tokens log-probs mean nothing: a ratio there could overflow and 0 * inf is NaN.
    log_ratio = torch.where(trained, inputs.logprobs - inputs.old_logprobs, 0.0)
    tokens = LossTokens(
        logprobs=torch.where(trained, inputs.logprobs, 0.0),
        log_ratio=log_ratio,
        advantages=_advantages(inputs, trained, algorithm.teacher_coef),
        trained=trained,
        columns=inputs,
        sequence_sum=inputs.sequence_sum or _one_sequence,
    )
    objective, held = surrogate(tokens)
    weights, metrics = weight, {}
    gap = inputs.old_logprobs - inputs.rollout_logprobs
    if algorithm.correction.active:
        factor, outside = correction(gap, trained, tokens.sequence_sum, **dict(algorithm.correction))
        weights = weight * factor
        metrics = {"correction/weight": weights.sum(), "correction/outside": (weight * outside).sum()}
    if algorithm.rejection.active:
        rejected = rejection(gap, trained, tokens.sequence_sum, **dict(algorithm.rejection))
        weights = torch.where(rejected, 0.0, weights)
        metrics["rejection/share"] = (weight * rejected).sum()
    if algorithm.opsm_delta is not None:
        drift = inputs.logprobs - inputs.rollout_logprobs
        delta = algorithm.opsm_delta
        masked = off_policy_sequences(drift, tokens.advantages, trained, tokens.sequence_sum, delta=delta)
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
    if algorithm.entropy_coef:
        total = total - algorithm.entropy_coef * (weight * torch.where(trained, inputs.entropy, 0.0)).sum()
    if algorithm.teacher_kl_coef:
        direction = DIRECTIONS[algorithm.teacher_kl]
        divergence = (weight * torch.where(trained, direction(inputs.top), 0.0)).sum()
        metrics["kl/teacher_top"] = divergence.detach()
        total = total + algorithm.teacher_kl_coef * divergence
    if inputs.reference_logprobs is not None:
        reference = torch.where(trained, inputs.reference_logprobs, 0.0)
        with torch.no_grad():
            metrics["kl/reference"] = (weight * k3(tokens.logprobs, reference)).sum()
        if algorithm.kl_coef:
            estimate = ESTIMATORS[algorithm.kl_estimator](tokens.logprobs, reference)
            if algorithm.kl_unbiased:
                estimate = bounded_ratio(log_ratio) * estimate
            penalty = (weight * estimate).sum()
            metrics["loss/kl"] = penalty.detach()
            total = total + algorithm.kl_coef * penalty
    return total, metrics


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
