"""Losses of values, a critic's and a reward model's: pure functions of tensors; the caller's weights hold the global
denominator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimx.data.columns import LossColumns


@dataclass(slots=True, kw_only=True)
class ValueInputs(LossColumns[torch.Tensor]):
    """Columns of one micro-batch, each [T]: a reward model's `advantages` are the derivatives of the unweighted loss by
    each score, with the sign turned."""

    predicted: torch.Tensor
    """Values under the present weights, with gradient."""


ValueLoss = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's part of the loss (a sum, already weighted) and metrics that add up the same way."""


def value_loss(inputs: ValueInputs, *, clip: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Half the squared error. A value that left its old one by more than `clip` counts with the error it would have at
    the edge if that is larger (PPO's reference code, openai/baselines; 2005.12729): moving on in one batch gains
    nothing. `clip` 0: not clipped."""
    weight, trained = inputs.weight, inputs.weight > 0
    # Beside trained tokens values may be anything, and 0 * inf would be NaN.
    values, old, returns = (torch.where(trained, x, 0.0) for x in (inputs.predicted, inputs.values, inputs.returns))
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
