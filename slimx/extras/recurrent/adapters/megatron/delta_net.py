"""Gated delta nets in megatron-core: layers beside those of attention, and the chunk rule in plain torch where
flash-linear-attention's CUDA kernels are absent. Written for megatron-core 0.19.2."""

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
    """Builds the norm of a delta net's heads: their factor is the weight itself also in a model whose other norms have
    1 + weight, which megatron-core has for all norms or for none."""

    def __new__(cls, *, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        return gpt_layer_specs.TENorm(config=plain, hidden_size=hidden_size, eps=eps)


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Layers of a decoder of which `linear_attention_freq` says which are delta nets (TransformerBlockSubmodules).

    The chunk rule is flash-linear-attention's on CUDA, if that is installed, else this package's."""
    if not (torch.cuda.is_available() and common.HAVE_FLA):
        _install_torch()
    block = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is GatedDeltaNet:
            attention.submodules.out_norm = OutputNorm
    return block


def _install_torch() -> None:
    """GatedDeltaNet's constructor asks for flash-linear-attention; the module takes three of its functions by name."""
    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv1d, chunk_gated_delta_rule


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """silu of the convolution of x [batch, length, channels], as flash-linear-attention's function of the name: with
    `cu_seqlens` one batch row that packs sequences."""
    flat, lengths = x.flatten(0, 1), _lengths(x, cu_seqlens)
    out = causal_convolution(flat, weight, lengths)
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
    """Outputs [batch, length, heads, dv] as flash-linear-attention's function of the name gives them; queries and keys
    are normed already."""
    flat = (x.flatten(0, 1) for x in (query, key, value, g, beta))
    out, _ = gated_delta_rule(*flat, _lengths(query, cu_seqlens))
    return out.view_as(value), None


def _lengths(x: torch.Tensor, bounds: torch.Tensor | None) -> list[int]:
    """Tokens of each sequence of x [batch, length, ...]; `bounds`: those of the sequences of one packed row.

    Rows without tokens (a micro-batch that is padding only) are no sequences."""
    lengths = [x.shape[1]] * x.shape[0] if bounds is None else (bounds[1:] - bounds[:-1]).tolist()
    return [length for length in lengths if length]
