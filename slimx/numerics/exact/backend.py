"""Which forward computes on a device: all have the same functions and the same bits."""

from types import ModuleType

import torch

from slimx.numerics.exact import reference


def forward_on(device: torch.device) -> ModuleType:
    """The module with the forward functions of `reference.py` for tensors on `device`."""
    return reference
