"""Products with a fixed order of summation in torch, on any device: slow and obvious. This is the specification: the
kernels of `csrc/exact.h` have the same bits, and their Python interfaces (`kernel.py`, `kernel_cuda.py`) the same
function."""

import torch
import torch.nn.functional as F

K_BLOCK = 32
"""Elements of a block of a dot product, whose even and odd elements form two chains."""
LEAST_NORMAL = 2.0**-126
_MOST = 2**20
"""Elements of a temporary: rows are processed in parts below this size."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes x [M, K] times weight [N, K] transposed -> [M, N] fp32; bf16 is widened.

    K is summed in blocks of K_BLOCK, padded with zeros: a block's even and odd elements are two chains of multiply-adds
    from zero; their sum is added to the total. Denormals are treated as zeros.
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
    """Pads x [rows, K] and returns it as fp64 [rows, blocks, K_BLOCK / 2, 2], denormals flushed."""
    padded = F.pad(flushed(x.float()), (0, -x.shape[1] % K_BLOCK))
    return padded.double().view(len(x), -1, K_BLOCK // 2, 2)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, flush: bool = False) -> torch.Tensor:
    """Computes a * b + c in fp32, rounded once; a, b fp64 tensors with fp32 values, c fp32.

    fp64 represents the product exactly but not always the sum, and rounding twice differs from rounding once. The sum
    is therefore rounded to odd, which gives the same second rounding to fewer than 52 bits as the exact sum (Boldo and
    Melquiond, IEEE TC 57(4), 2008). `flush`: results below the least normal number after rounding become zeros of the
    same sign.
    """
    both = a * b
    c = c.double()
    total = both + c
    second = total - both
    error = (both - (total - second)) + (c - second)  # TwoSum: total + error is exact
    bits = total.view(torch.int64)
    even = (error != 0) & (bits & 1 == 0) & total.isfinite()
    outwards = torch.where((error > 0) == (total > 0), 1, -1)
    total = torch.where(even, bits + outwards, bits).view(torch.float64)
    if flush:
        total = torch.where(total.abs() < LEAST_NORMAL - 2.0**-151, total * 0.0, total)
    return total.float()


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Replaces denormals of fp32 `x` by zeros of the same sign."""
    return torch.where(x.abs() < LEAST_NORMAL, x * 0.0, x)
