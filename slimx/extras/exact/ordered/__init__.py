"""Products whose sums have one order: a row's result depends on that row alone, whatever the batch, the number of
threads or the device. Three times with the same bits: in torch (`reference`), by CPU kernels (`kernel`) and by CUDA
kernels (`kernel_cuda`).
"""

import functools
from types import ModuleType

import torch

from slimx.extras.exact.ordered import kernel, kernel_cuda, reference


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x [M, K] times weight [N, K] transposed, both fp32 -> [M, N] fp32. No gradient."""
    return chosen(x.device, kernel, kernel_cuda, reference).product(x, weight)


def chosen(device: torch.device, cpu: ModuleType, cuda: ModuleType, plain: ModuleType) -> ModuleType:
    """The module for tensors on `device`: kernels where there are any, else `plain`."""
    if device.type == "cuda":
        return cuda if _has_cuda_kernels() else plain
    return cpu if device.type == "cpu" and _has_kernels() else plain


@functools.cache
def _has_kernels() -> bool:
    """Returns True if the CPU library is built and has kernels for this processor; refuses a stale or broken one."""
    return kernel.LIBRARY.exists() and bool(kernel.isas())


@functools.cache
def _has_cuda_kernels() -> bool:
    """Returns True if the CUDA library is built; refuses a stale or broken one."""
    return kernel_cuda.LIBRARY.exists() and kernel_cuda.load(kernel_cuda.LIBRARY) is not None
