"""Builds decoders with gated delta nets and attention layers in megatron-core. The gated delta rule is computed in
plain torch if flash-linear-attention's CUDA kernels are not available. Written for megatron-core 0.19.2."""

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
    """Builder of the norm over a delta net's heads. The norm multiplies by `weight` even if the model's other norms
    multiply by 1 + weight; megatron-core has only one setting for all norms."""

    def __new__(cls, *, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        return gpt_layer_specs.TENorm(config=plain, hidden_size=hidden_size, eps=eps)


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Returns the spec (TransformerBlockSubmodules) of a decoder whose `linear_attention_freq` in `config` has a 1 for
    each delta net. `vp_stage`: index of the virtual pipeline stage; None without virtual stages.

    The gated delta rule is computed by flash-linear-attention on CUDA if that package is installed, otherwise in plain
    torch by this extra.
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
    """Replaces the three functions that megatron-core's GatedDeltaNet imports from flash-linear-attention with torch
    functions. GatedDeltaNet's constructor checks for that package, so the package is also marked as installed."""
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
    """Computes silu of the causal depthwise convolution of x [batch, length, channels]. Replaces
    flash-linear-attention's function of the same name. `cu_seqlens`: bounds of the sequences that are packed in the
    only row of the batch; None: each row is one sequence."""
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
    """Computes the gated delta rule and returns its outputs [batch, length, heads, dv]. Replaces
    flash-linear-attention's function of the same name. `g`: logarithms of the decays; `beta`: learning rates;
    `cu_seqlens`: bounds of the sequences packed in the only row of the batch, or None if each row is one sequence.
    Queries and keys are already L2-normalized."""
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
    """Returns the lengths of the sequences in x [batch, length, ...]. `bounds`: bounds of the sequences packed in one
    row; None: each row is one sequence.

    Empty sequences, as in a micro-batch that contains only padding, are left out.
    """
    lengths = [x.shape[1]] * x.shape[0] if bounds is None else (bounds[1:] - bounds[:-1]).tolist()
    return [length for length in lengths if length]
