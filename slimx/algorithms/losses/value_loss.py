"""Losses of values, a critic's and a reward model's: pure functions of tensors; the caller's weights hold the global
denominator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """Per-token tensors of one micro-batch, each [T]."""

    values: torch.Tensor
    """The critic's, with gradient."""
    weight: torch.Tensor
    """Loss weight; sums to 1 over all micro-batches and data-parallel ranks; 0 where not trained."""
    old_values: torch.Tensor | None = None
    """A critic's before the step's first update."""
    returns: torch.Tensor | None = None
    """Targets of a critic's values."""
    slopes: torch.Tensor | None = None
    """Derivative of the unweighted loss by each score of a reward model, with the sign turned: how much it is to
    rise."""


ValueLoss = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's part of the loss (a sum, already weighted) and metrics that add up the same way."""


def value_loss(*, clip: float) -> ValueLoss:
    """Half the squared error. A value that left its old one by more than `clip` counts with the error it would have at
    the edge if that is larger (PPO's reference code, openai/baselines; 2005.12729): moving on in one batch gains
    nothing. `clip` 0: not clipped."""

    def loss(inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight, trained = inputs.weight, inputs.weight > 0
        # Beside trained tokens values may be anything, and 0 * inf would be NaN.
        values, old, returns = (
            torch.where(trained, x, 0.0) for x in (inputs.values, inputs.old_values, inputs.returns)
        )
        squared = held = (values - returns).square()
        if clip:
            held = torch.maximum(squared, (values.clamp(old - clip, old + clip) - returns).square())
        total = 0.5 * (weight * held).sum()
        with torch.no_grad():
            metrics = {
                "value/loss": total.detach(),
                "value/clip_fraction": (weight * (held > squared)).sum(),
                "value/mean": (weight * values).sum(),
            }
        return total, metrics

    return loss


def score_loss(inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The function with the gradient of the Bradley-Terry loss, whose derivatives by the scores are known
    (`slimx.algorithms.advantages.bradley_terry`); its value means nothing, so there are no metrics."""
    scores = torch.where(inputs.weight > 0, inputs.values, 0.0)
    return -(inputs.weight * inputs.slopes * scores).sum(), {}
