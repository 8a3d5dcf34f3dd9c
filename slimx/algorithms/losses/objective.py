"""The loss of the configured algorithm: a pure function of per-token tensors. The loss weights in its inputs are
already divided by the denominator of the update."""

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
    """Returns the loss function that section `algorithm` configures."""
    kind = algorithm.loss.kind
    if kind == "sft":
        return sft_loss
    if "loss" in algorithm.hooks:
        return load_loss(kind)
    surrogate = partial(getattr(surrogates, kind), **algorithm.loss.model_dump(exclude={"kind"}))
    return partial(policy_loss, surrogate=surrogate, algorithm=algorithm)


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Computes the weighted cross entropy of the demonstrated tokens."""
    loss = -(inputs.weight * inputs.logprobs).sum()
    return loss, {"loss/sft": loss.detach()}


def policy_loss(
    inputs: LossInputs, surrogate: Surrogate, algorithm: Algorithm
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Computes the loss of a policy: -surrogate + kl_coef * KL(policy || reference) - entropy_coef * entropy +
    teacher_kl_coef * KL with the teacher, with the coefficients of `algorithm`. `surrogate`: objective to maximize.

    Other settings of `algorithm`:

    - `kl_unbiased`: multiplies the KL estimate by policy / old, so that the mean of its gradient is the gradient of the
      KL even if another policy sampled the tokens (DeepSeek-V3.2, 2512.02556).
    - `teacher_coef`: coefficient of log teacher - log engine in each token's advantage, a single-sample estimate of the
      reverse KL (on-policy distillation, thinkingmachines.ai/blog/on-policy-distillation).
    - `teacher_kl_coef`: coefficient of the divergence `teacher_kl` (`slimx.algorithms.losses.kl`) at each token,
      regardless of advantage and ratio (2306.13649, section 3.2, which does not differentiate through the sampling
      either).
    - `correction` multiplies the surrogate by importance weights; `rejection` and `opsm_delta` (`off_policy_sequences`)
      exclude tokens from it. The other terms keep every token."""
    weight = inputs.weight
    trained = inputs.weight > 0
    # Log-probs of untrained tokens are arbitrary: a ratio there could overflow, and 0 * inf is NaN.
    tokens = LossTokens(
        logprobs=torch.where(trained, inputs.logprobs, 0.0),
        log_ratio=torch.where(trained, inputs.logprobs - inputs.old_logprobs, 0.0),
        advantages=_advantages(inputs, trained, algorithm.teacher_coef),
        trained=trained,
        columns=inputs,
        sequence_sum=inputs.sequence_sum or _one_sequence,
    )
    objective, clipped = surrogate(tokens)
    weights, metrics = _surrogate_weights(inputs, tokens, algorithm)
    policy = -(weights * objective).sum()
    total = policy
    with torch.no_grad():
        metrics |= {
            "loss/policy": policy.detach(),
            "loss/clip_fraction": (weight * (clipped & trained)).sum(),
            "kl/rollout": (weight * kl_from_rollout(inputs, trained)).sum(),
        }
        if inputs.entropy is not None:
            metrics["policy/entropy"] = (weight * inputs.entropy).sum()
        if inputs.teacher_logprobs is not None:
            teacher = torch.where(trained, inputs.teacher_logprobs, 0.0)
            metrics["kl/teacher"] = (weight * k3(tokens.logprobs, teacher)).sum()
    if algorithm.entropy_coef:
        assert inputs.entropy is not None
        total = total - algorithm.entropy_coef * (weight * torch.where(trained, inputs.entropy, 0.0)).sum()
    if algorithm.teacher_kl_coef:
        assert inputs.top is not None
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
                estimate = bounded_ratio(tokens.log_ratio) * estimate
            penalty = (weight * estimate).sum()
            metrics["loss/kl"] = penalty.detach()
            total = total + algorithm.kl_coef * penalty
    return total, metrics


def _surrogate_weights(
    inputs: LossInputs, tokens: LossTokens, algorithm: Algorithm
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the surrogate's weights per token after correction, rejection and off-policy sequence masking, and the
    metrics of these three."""
    weight = inputs.weight
    weights = weight
    metrics: dict[str, torch.Tensor] = {}
    gap = inputs.old_logprobs - inputs.rollout_logprobs
    if algorithm.correction.active:
        factor, outside = correction(gap, tokens.trained, tokens.sequence_sum, **dict(algorithm.correction))
        weights = weight * factor
        metrics = {"correction/weight": weights.sum(), "correction/outside": (weight * outside).sum()}
    if algorithm.rejection.active:
        rejected = rejection(gap, tokens.trained, tokens.sequence_sum, **dict(algorithm.rejection))
        weights = torch.where(rejected, 0.0, weights)
        metrics["rejection/share"] = (weight * rejected).sum()
    if algorithm.opsm_delta is not None:
        drift = inputs.logprobs - inputs.rollout_logprobs
        masked = off_policy_sequences(
            drift, tokens.advantages, tokens.trained, tokens.sequence_sum, delta=algorithm.opsm_delta
        )
        weights = torch.where(masked, 0.0, weights)
        metrics["opsm/share"] = (weight * masked).sum()
    return weights, metrics


def kl_from_rollout(inputs: LossInputs, trained: torch.Tensor) -> torch.Tensor:
    """Computes KL(rollout || policy) per token with `k3`. The arguments of `k3` are swapped, because the rollout's
    policy sampled the tokens."""
    difference = torch.where(trained, inputs.logprobs - inputs.rollout_logprobs, 0.0)
    return k3(torch.zeros_like(difference), difference)


def _advantages(inputs: LossInputs, trained: torch.Tensor, teacher_coef: float) -> torch.Tensor:
    if not teacher_coef:
        return inputs.advantages
    assert inputs.teacher_logprobs is not None
    difference = torch.where(trained, inputs.teacher_logprobs - inputs.rollout_logprobs, 0.0)
    return inputs.advantages + teacher_coef * difference


def _one_sequence(values: torch.Tensor) -> torch.Tensor:
    return values.sum().expand_as(values)
