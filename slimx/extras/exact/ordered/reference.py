"""Products with one order of sums in torch, on any device: slow and obvious. This is the specification: the kernels of
`csrc/exact.h` have the same bits, and their Python sides (`kernel.py`, `kernel_cuda.py`) the same function.
"""

import torch
import torch.nn.functional as F

K_BLOCK = 32
"""Elements of a block of a dot product: its even and its odd elements are two chains."""
LEAST_NORMAL = 2.0**-126
_MOST = 2**20
"""Elements of a temporary: rows are taken in parts that stay below it."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x [M, K] times weight [N, K] transposed -> [M, N] fp32; bf16 is widened.

    K is summed in blocks of K_BLOCK, filled up by zeros: a block's even and odd elements are two chains of
    multiply-adds from zero; their sum joins the total. Denormals count as zeros.
    """
    if not len(x):
        return x.new_zeros(0, len(weight), dtype=torch.float32)
    x, weight = (
        F.pad(flushed(t.float()), (0, -t.shape[1] % K_BLOCK)).double().view(len(t), -1, K_BLOCK // 2, 2)
        for t in (x, weight)
    )
    out = x.new_zeros(len(x), len(weight), dtype=torch.float32)
    for own in torch.arange(len(x)).split(max(1, _MOST // max(weight[:, :, 0].numel(), 1))):
        rows, chain = x[own][:, None], torch.zeros(len(own), *weight[:, :, 0].shape, device=x.device)
        for step in range(K_BLOCK // 2):
            chain = fma(rows[:, :, :, step], weight[None, :, :, step], chain, flush=True)
        blocks = flushed(chain[..., 0] + chain[..., 1])
        total = torch.zeros_like(blocks[..., 0])
        for block in range(blocks.shape[2]):
            total = flushed(total + blocks[..., block])
        out[own] = total
    return out


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, flush: bool = False) -> torch.Tensor:
    """Multiply-add a * b + c in fp32, rounded once; a, b fp64 tensors that hold fp32 values, c fp32.

    fp64 holds the product exactly but not always the sum, and rounding that twice is not rounding it once. So the sum
    is rounded to odd, which a second rounding to fewer than 52 bits cannot tell from the exact one (Boldo and
    Melquiond, IEEE TC 57(4), 2008). `flush`: what is below the least normal number after rounding becomes a zero of its
    sign.
    """
    both, c = a * b, c.double()
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
    """Replace denormals of fp32 `x` by zeros of their sign."""
    return torch.where(x.abs() < LEAST_NORMAL, x * 0.0, x)
