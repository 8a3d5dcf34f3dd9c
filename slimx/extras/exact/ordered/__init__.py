"""Matrix products with a fixed order of summation: a row's result depends only on that row, not on the batch, the
number of threads or the device. The results of three implementations are bitwise equal: torch (`reference`), CPU
kernels (`kernel`) and CUDA kernels (`kernel_cuda`)."""

import functools
from types import ModuleType

import torch

from slimx.extras.exact.ordered import kernel, kernel_cuda, reference


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes x [M, K] times weight [N, K] transposed, fp32 [M, N], without gradient. Both must be fp32."""
    return module_for(x.device, kernel, kernel_cuda, reference).product(x, weight)


def module_for(device: torch.device, cpu: ModuleType, cuda: ModuleType, plain: ModuleType) -> ModuleType:
    """Returns the module to use for tensors on `device`: `cpu` or `cuda` if its kernels are available, otherwise
    `plain`, the torch implementation."""
    if device.type == "cuda":
        return cuda if _has_cuda_kernels() else plain
    return cpu if device.type == "cpu" and _has_kernels() else plain


@functools.cache
def _has_kernels() -> bool:
    """Returns True if the CPU library is built and has kernels for this processor. Raises SlimxError if the library is
    outdated or cannot be loaded."""
    return kernel.LIBRARY.exists() and bool(kernel.isas())


@functools.cache
def _has_cuda_kernels() -> bool:
    """Returns True if the CUDA library is built. Raises SlimxError if the library is outdated or cannot be loaded."""
    return kernel_cuda.LIBRARY.exists() and kernel_cuda.load(kernel_cuda.LIBRARY) is not None
