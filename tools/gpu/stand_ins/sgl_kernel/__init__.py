"""The operations of sglang-kernel that SGLang calls for a Qwen3-MoE in bfloat16, in plain torch.

For a GPU machine on which sglang-kernel is not installed or does not load: its library belongs to one version of torch.
Written for sglang 0.5.23 and the signatures and rounding of sglang-kernel 0.4.10; `enable_pdl` changes no result.
Every other name that SGLang imports with them refuses to be called, and no further name exists: SGLang chooses kernels
by what there is.
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
"""Names that SGLang imports at module level but never calls for these models."""
for _name in REFUSED:
    globals()[_name] = refused(_name)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Returns `input` [n, d] over its root mean square, times `weight` [d]: in float32, rounded once."""
    normed = _normed(input.float(), weight, eps)
    return normed.to(input.dtype) if out is None else out.copy_(normed)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds `input` to `residual` and norms the sum into `input`, both in place. The norm is of the sum before it is
    rounded, as in the kernel."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_normed(total, weight, eps))


def _normed(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()


def moe_sum_reduce(input_tensor: torch.Tensor, output_tensor: torch.Tensor, routed_scaling_factor: float = 0.0) -> None:
    """Writes the sum over the experts of `input_tensor` [n, k, d], times the factor, into `output_tensor` [n, d]: in
    float32, rounded once. One expert is added after the other, as in the kernel, so no other token changes a sum."""
    total = input_tensor[:, 0].float()
    for expert in range(1, input_tensor.shape[1]):
        total = total + input_tensor[:, expert]
    output_tensor.copy_(total * routed_scaling_factor)


def moe_align_block_size(*args: Any) -> None:
    """Sorts tokens by expert into padded blocks, by the kernel that SGLang compiles at run time."""
    from sglang.kernels.ops.moe.moe_align import moe_align_block_size as compiled  # which itself imports this package

    compiled(*args)
