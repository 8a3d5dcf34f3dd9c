"""The reshard kernels as an operator of torch, `torch.ops.slimx.pack`, so that a program with them can be traced,
compiled and captured.

Records reach it as bytes, since torch has no structured dtypes. The sources are arguments only so that torch keeps them
alive and in order: the records hold their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.cpu import PIECE


def record_bytes(pieces: np.ndarray) -> torch.Tensor:
    """The records [n] of `PIECE` as the operator takes them: uint8 [n, 128], a copy on the CPU."""
    return torch.from_numpy(pieces.view(np.uint8).reshape(-1, PIECE.itemsize).copy())


@torch.library.custom_op("slimx::pack", mutates_args=("bucket", "sums", "flags"), device_types="cpu")
def pack(
    sources: Sequence[torch.Tensor],
    pieces: torch.Tensor,
    bucket: torch.Tensor,
    sums: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """What `kernel.pack` does with `pieces` (`record_bytes`), which read `sources`, into `bucket` [bytes] uint8.

    `sums` [tensors] int64: the bits of the uint64 checksums, added to. `flags` [tensors] int32: bits such as NONFINITE
    are set; nothing is raised for them.
    """
    _check(pieces, sums, flags)
    records = pieces.numpy().view(PIECE).reshape(-1)
    kernel.pack(records, bucket, sums.numpy().view(np.uint64), flags.numpy().view(np.uint32))


@pack.register_kernel("cuda")
def _(
    sources: Sequence[torch.Tensor],
    pieces: torch.Tensor,
    bucket: torch.Tensor,
    sums: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Makes a plan for this one call, which waits for the device: a publication, or a CUDA graph, uses
    `kernel_cuda.pack` with a plan of its own."""
    from slimx.reshard.kernels import cuda as kernel_cuda

    _check(pieces, sums, flags)
    plan = kernel_cuda.DevicePlan(
        pieces.cpu().numpy().view(PIECE).reshape(-1),
        bucket_bytes=bucket.numel(),
        names=[f"tensor {k}" for k in range(len(sums))],
        bucket="of torch.ops.slimx.pack",
        device=bucket.device,
    )
    kernel_cuda.pack(plan, bucket, sums, flags)


@pack.register_fake
def _(
    sources: Sequence[torch.Tensor],
    pieces: torch.Tensor,
    bucket: torch.Tensor,
    sums: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    _check(pieces, sums, flags)


def _check(pieces: torch.Tensor, sums: torch.Tensor, flags: torch.Tensor) -> None:
    if pieces.dtype != torch.uint8 or pieces.dim() != 2 or pieces.shape[1] != PIECE.itemsize:
        raise SlimxError(f"pieces are {pieces.dtype} {list(pieces.shape)}: pass record_bytes(records), uint8 [n, 128]")
    if sums.dtype != torch.int64 or flags.dtype != torch.int32 or sums.shape != flags.shape:
        raise SlimxError(
            f"sums are {sums.dtype} {list(sums.shape)} and flags {flags.dtype} {list(flags.shape)}: pass int64 and "
            "int32 of one length"
        )
