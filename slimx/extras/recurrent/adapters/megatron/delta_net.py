"""Gated delta nets in megatron-core, alternating with attention layers, and the chunk rule in plain torch if
flash-linear-attention's CUDA kernels are not available. Written for megatron-core 0.19.2."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from megatron.core.transformer import TransformerConfig

from slimx.extras.recurrent.numerics.delta_rule import causal_convolution, gated_delta_rule, l2norm


class OutputNorm:
    """Builder of the norm of a delta net's heads, which multiplies by `weight` even if the model's other norms use 1 +
    weight. In megatron-core that is one setting for all norms."""

    def __new__(cls, *, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        return gpt_layer_specs.TENorm(config=plain, hidden_size=hidden_size, eps=eps)


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Returns the spec of a decoder whose `linear_attention_freq` marks the delta nets (TransformerBlockSubmodules).

    The chunk rule is flash-linear-attention's on CUDA if installed, else this package's.
    """
    if not (torch.cuda.is_available() and common.HAVE_FLA):
        _install_torch()
    block = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is GatedDeltaNet:
            attention.submodules.out_norm = OutputNorm
    return block


def _install_torch() -> None:
    """Installs the torch functions in GatedDeltaNet's module, which takes three functions of flash-linear-attention by
    name and checks for the package in its constructor."""
    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.causal_conv1d = causal_conv1d
    gdn.chunk_gated_delta_rule = chunk_gated_delta_rule


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Computes silu of the convolution of x [batch, length, channels]. Replaces flash-linear-attention's function of
    the same name; with `cu_seqlens`, the batch is one row of packed sequences."""
    out = causal_convolution(x.flatten(0, 1), weight, _lengths(x, cu_seqlens))
    if bias is not None:
        out = out + bias
    return torch.nn.functional.silu(out).view_as(x), None


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Returns outputs [batch, length, heads, dv]. Replaces flash-linear-attention's function of the same name; queries
    and keys are already normed."""
    out, _ = gated_delta_rule(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        g.flatten(0, 1),
        beta.flatten(0, 1),
        _lengths(query, cu_seqlens),
    )
    return out.view_as(value), None


def _lengths(x: torch.Tensor, bounds: torch.Tensor | None) -> list[int]:
    """Returns the sequence lengths of x [batch, length, ...]; `bounds`: those of the sequences of one packed row.

    Sequences without tokens (a micro-batch of padding only) are left out.
    """
    lengths = [x.shape[1]] * x.shape[0] if bounds is None else (bounds[1:] - bounds[:-1]).tolist()
    return [length for length in lengths if length]
