"""Matrix products with a fixed order of summation in torch, slow but simple, for any device. This is the specification:
the kernels in `csrc/exact.h`, called by functions of the same name in `kernel.py` and `kernel_cuda.py`, return the same
bits."""

import torch
import torch.nn.functional as F

K_BLOCK = 32
"""Number of elements of a dot product that form a block; the block's even and odd elements are summed in two separate
chains of multiply-adds."""
LEAST_NORMAL = 2.0**-126
_MOST = 2**20
"""Maximum number of elements in a temporary tensor; rows are processed in parts of at most this size."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes x [M, K] times weight [N, K] transposed, fp32 [M, N]. bf16 inputs are converted to fp32.

    K is padded with zeros and summed in blocks of K_BLOCK. A block's even and odd elements are two chains of
    multiply-adds that start from zero; the sum of the two chains is added to the total. Denormals count as zeros.
    """
    if not len(x):
        return x.new_zeros(0, len(weight), dtype=torch.float32)
    x = _in_blocks(x)
    weight = _in_blocks(weight)
    out = x.new_zeros(len(x), len(weight), dtype=torch.float32)
    for rows in torch.arange(len(x)).split(max(1, _MOST // max(weight[:, :, 0].numel(), 1))):
        part = x[rows][:, None]
        chain = torch.zeros(len(rows), *weight[:, :, 0].shape, device=x.device)
        for step in range(K_BLOCK // 2):
            chain = fma(part[:, :, :, step], weight[None, :, :, step], chain, flush=True)
        blocks = flushed(chain[..., 0] + chain[..., 1])
        total = torch.zeros_like(blocks[..., 0])
        for block in range(blocks.shape[2]):
            total = flushed(total + blocks[..., block])
        out[rows] = total
    return out


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """Returns x [rows, K], padded with zeros and with denormals replaced by zeros, as fp64 [rows, blocks, K_BLOCK / 2,
    2]."""
    padded = F.pad(flushed(x.float()), (0, -x.shape[1] % K_BLOCK))
    return padded.double().view(len(x), -1, K_BLOCK // 2, 2)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, flush: bool = False) -> torch.Tensor:
    """Computes a * b + c, rounded once to fp32. `a` and `b` are fp64 tensors whose values are fp32 numbers; `c` is
    fp32.

    fp64 represents the product exactly but not always the sum, and rounding twice can differ from rounding once. The
    sum is therefore rounded to odd, after which rounding to fewer than 52 bits gives the same result as from the exact
    sum (Boldo and Melquiond, IEEE TC 57(4), 2008). `flush`: True to replace results that are denormal after rounding by
    zeros of the same sign.
    """
    both = a * b
    c = c.double()
    total = both + c
    second = total - both
    error = (both - (total - second)) + (c - second)  # TwoSum: total + error equals the exact sum
    bits = total.view(torch.int64)
    even = (error != 0) & (bits & 1 == 0) & total.isfinite()
    outwards = torch.where((error > 0) == (total > 0), 1, -1)
    total = torch.where(even, bits + outwards, bits).view(torch.float64)
    if flush:
        total = torch.where(total.abs() < LEAST_NORMAL - 2.0**-151, total * 0.0, total)
    return total.float()


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Returns fp32 `x` with denormals replaced by zeros of the same sign."""
    return torch.where(x.abs() < LEAST_NORMAL, x * 0.0, x)
