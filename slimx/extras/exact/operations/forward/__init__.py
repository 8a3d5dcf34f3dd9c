"""The forward of exact mode, three times with the same functions and bits: in torch (`reference`), by CPU kernels
(`kernel`) and by CUDA kernels (`kernel_cuda`). `forward_on` chooses by device."""

from types import ModuleType

import torch

from slimx.extras.exact.operations.forward import kernel, kernel_cuda, reference
from slimx.extras.exact.ordered import chosen


def forward_on(device: torch.device) -> ModuleType:
    """The module with the forward functions of `reference.py` for tensors on `device`: kernels where there are any."""
    return chosen(device, kernel, kernel_cuda, reference)
