"""The forward of exact mode, three times with the same functions and bits: in torch (`reference`), by CPU kernels
(`kernel`) and by CUDA kernels (`kernel_cuda`). `forward_on` chooses by device."""

import functools
from types import ModuleType

import torch

from slimx.numerics.exact.forward import kernel, kernel_cuda, reference


def forward_on(device: torch.device) -> ModuleType:
    """The module with the forward functions of `reference.py` for tensors on `device`: kernels where there are any."""
    if device.type == "cuda":
        return kernel_cuda if _has_cuda_kernels() else reference
    return kernel if device.type == "cpu" and _has_kernels() else reference


@functools.cache
def _has_kernels() -> bool:
    """Returns True if the CPU library is built and has kernels for this processor; refuses a stale or broken one."""
    return kernel.LIBRARY.exists() and bool(kernel.isas())


@functools.cache
def _has_cuda_kernels() -> bool:
    """Returns True if the CUDA library is built; refuses a stale or broken one."""
    return kernel_cuda.LIBRARY.exists() and kernel_cuda.load(kernel_cuda.LIBRARY) is not None
