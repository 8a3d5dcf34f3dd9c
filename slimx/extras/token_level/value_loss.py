"""Losses of a critic's or reward model's outputs, as pure functions of tensors. The loss weights that callers pass are
already divided by the denominator of the whole update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimx.data.columns import LossColumns


@dataclass(slots=True, kw_only=True)
class ValueInputs(LossColumns[torch.Tensor]):
    """Columns of one micro-batch, each [T]. For a reward model, `advantages` contain the negated derivative of the
    unweighted loss with respect to each score."""

    predicted: torch.Tensor
    """Differentiable outputs of the value model under the current weights."""


ValueLoss = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Function that returns a micro-batch's contribution to the loss (a weighted sum over its tokens) and its metrics,
which are summed over micro-batches."""


def value_loss(inputs: ValueInputs, *, clip: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Computes half the squared error of the values against `returns`.

    If a value differs from its old value by more than `clip`, the error is at least that at the clip boundary, so
    moving further in one batch gains nothing (PPO's reference code, openai/baselines; arXiv:2005.12729). A `clip` of 0
    disables this bound."""
    assert inputs.values is not None
    assert inputs.returns is not None
    weight = inputs.weight
    trained = inputs.weight > 0
    # Values of untrained tokens are arbitrary, and 0 * inf would be NaN.
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
