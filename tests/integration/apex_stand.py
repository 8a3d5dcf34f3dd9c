"""A machine that has apex's extension `fused_weight_gradient_mlp_cuda`, with its two functions in plain torch.

The signatures are those of NVIDIA's apex (csrc/megatron/fused_weight_gradient_dense.cpp): three tensors by position, of
which the last is added to.
"""

from __future__ import annotations

import sys
import types

import torch

FP32: list[tuple[int, ...]] = []
BF16: list[tuple[int, ...]] = []
"""Shapes of the gradients that this process added to by each function."""


def wgrad_gemm_accum_fp32(input_: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor, /) -> None:
    """d_weight [out, in] fp32 += d_output [tokens, out]^T input [tokens, in]."""
    assert d_weight.dtype == torch.float32
    _add(FP32, input_, d_output, d_weight)


def wgrad_gemm_accum_fp16(input_: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor, /) -> None:
    """The same with a gradient of the operands' own dtype."""
    assert d_weight.dtype == torch.bfloat16
    _add(BF16, input_, d_output, d_weight)


def _add(calls: list[tuple[int, ...]], input_: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor) -> None:
    assert input_.dtype == d_output.dtype == torch.bfloat16
    assert d_weight.shape == (d_output.shape[-1], input_.shape[-1])
    calls.append(tuple(d_weight.shape))
    # Rounded as the product that is not fused is; on a GPU it is not.
    d_weight.add_(d_output.flatten(0, -2).T @ input_.flatten(0, -2))


def install() -> None:
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32, module.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16
    sys.modules[module.__name__] = module
