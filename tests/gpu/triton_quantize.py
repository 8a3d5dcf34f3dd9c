"""Block quantization as it is written in Triton: what the rule triton must equal. In a file of its own, as it imports
Triton, which reads a kernel's source from its file."""

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize(x_ptr, q_ptr, s_ptr, top, least, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x)), least)
    scale = amax / top
    q = tl.clamp(x * (1.0 / scale), -top, top).to(tl.float8e4nv)
    tl.store(q_ptr + at, q)
    tl.store(s_ptr + row, scale)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [blocks, elements] and scales [blocks] of bf16 `x` [blocks, elements], one block a row."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    # 448 is an argument, as a compiler may turn the division by a constant into a multiplication.
    _quantize[(len(x),)](x, codes, scales, 448.0, 1e-10, BLOCK=x.shape[1])
    return codes, scales
