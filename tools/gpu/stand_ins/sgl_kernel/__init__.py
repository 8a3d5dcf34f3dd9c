"""The operations of sglang-kernel that SGLang calls for a Qwen3-MoE in bfloat16, in plain torch.

For a GPU machine on which sglang-kernel is not installed or does not load: its library belongs to one version of torch.
Every other name that SGLang imports with them refuses to be called, and no further name exists, for SGLang looks at what
there is to choose its kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_kernel.refused import refused

__version__ = "0.4.10"
REFUSED = (
    "moe_sum",
    "int8_scaled_mm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "silu_and_mul",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
)
"""Imported at module level beside what is called."""
for _name in REFUSED:
    globals()[_name] = refused(_name)


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns `input` [n, d] over its root mean square, times `weight` [d]: in float32, rounded once."""
    values = input.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(input.dtype) if out is None else out.copy_(normed)


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    """Adds `input` to `residual` and norms the sum into `input`, both in place. The norm is of the sum before it is
    rounded, as in the kernel."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float())


def moe_sum_reduce(input: torch.Tensor, output: torch.Tensor, routed_scaling_factor: float = 0.0) -> None:
    """Writes the sum over the experts of `input` [n, k, d], times the factor, into `output` [n, d]."""
    output.copy_(input.float().sum(1) * routed_scaling_factor)


def moe_align_block_size(*args: Any) -> None:
    """Sorts tokens by expert into padded blocks, by the kernel that SGLang compiles at run time."""
    from sglang.kernels.ops.moe.moe_align import moe_align_block_size as compiled  # which itself imports this package

    compiled(*args)
