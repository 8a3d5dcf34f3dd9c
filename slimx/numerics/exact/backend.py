"""Which forward computes on a device: all have the same functions and the same bits."""

import functools
from types import ModuleType

import torch

from slimx.numerics.exact import kernel, reference


def forward_on(device: torch.device) -> ModuleType:
    """The module with the forward functions of `reference.py` for tensors on `device`."""
    return kernel if device.type == "cpu" and _has_kernels() else reference


@functools.cache
def _has_kernels() -> bool:
    """Whether the CPU library is built and has kernels for this processor; a stale or broken one is refused."""
    return kernel.LIBRARY.exists() and bool(kernel.isas())
