"""Checksums of tensors, or parts of them, where they lie: in host memory, or on a GPU without leaving it."""

from __future__ import annotations

import numpy as np
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan


def sum_rects(pieces: np.ndarray, count: int, device: torch.device | None) -> np.ndarray:
    """The shares that `pieces` [n] of `PIECE` add to the checksums [count] uint64 of their tensors, without seeds.

    `device`: where their sources are, None for host memory. Waits for the device's current stream, so that what was
    queued on it before is seen.
    """
    sums = np.zeros(count, dtype=np.uint64)
    if device is None:
        kernel.checksum_rects(pieces, sums)
        return sums
    if not len(pieces):
        return sums
    names = [f"tensor {number}" for number in range(count)]
    plan = DevicePlan(pieces, bucket_bytes=0, names=names, bucket="of checksums", device=device, checksum=True)
    on_device = torch.zeros(count, dtype=torch.int64, device=device)
    kernel_cuda.checksum_rects(plan, on_device)
    return kernel_cuda.results(plan, on_device)
