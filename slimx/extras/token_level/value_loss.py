"""Losses of values, of a critic and of a reward model: pure functions of tensors; the caller's weights include the
global denominator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimx.data.columns import LossColumns


@dataclass(slots=True, kw_only=True)
class ValueInputs(LossColumns[torch.Tensor]):
    """Columns of one micro-batch, each [T]; a reward model's `advantages` are the negated derivatives of the unweighted
    loss with respect to each score."""

    predicted: torch.Tensor
    """Values under the current weights, with gradient."""


ValueLoss = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's part of the loss (a weighted sum) and metrics that add up over micro-batches."""


def value_loss(inputs: ValueInputs, *, clip: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Computes half the squared error. A value that differs from its old one by more than `clip` counts with the error
    at the clip boundary if that is larger (PPO's reference code, openai/baselines; 2005.12729): moving further in one
    batch gains nothing. `clip` 0: not clipped."""
    assert inputs.values is not None
    assert inputs.returns is not None
    weight = inputs.weight
    trained = inputs.weight > 0
    # At untrained tokens values are arbitrary, and 0 * inf would be NaN.
    values = torch.where(trained, inputs.predicted, 0.0)
    old = torch.where(trained, inputs.values, 0.0)
    returns = torch.where(trained, inputs.returns, 0.0)
    squared = (values - returns).square()
    error = squared
    if clip:
        error = torch.maximum(squared, (values.clamp(old - clip, old + clip) - returns).square())
    total = 0.5 * (weight * error).sum()
    with torch.no_grad():
        metrics = {
            "value/loss": total.detach(),
            "value/clip_fraction": (weight * (error > squared)).sum(),
            "value/mean": (weight * values).sum(),
        }
    return total, metrics
