"""Parameters that a model stores, but does not compute with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def add_constants(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Adds an uninitialized, frozen parameter to `model` for each name in `shapes`, which maps dotted names to
    shapes."""
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.empty(shape), requires_grad=False))
