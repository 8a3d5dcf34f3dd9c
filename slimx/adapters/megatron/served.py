"""Layers that multiply by another tensor than their parameter: by what engines get of it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def serve(parameter: torch.nn.Parameter, value: Callable[[], torch.Tensor]) -> None:
    """Have the layers that ask `served` multiply by what `value` returns [as parameter] in the place of `parameter`."""
    parameter.served = value


def served(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that a layer with `parameter` multiplies by."""
    value = getattr(parameter, "served", None)
    return parameter if value is None else value()
