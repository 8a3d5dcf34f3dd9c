"""megatron-core's sparse attention (DSA) over packed sequences. Written for megatron-core 0.19.2."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slimx.adapters.megatron.layers import Norm


class Replicated(Linear):
    """The duplicated Linear of an indexer, which each tensor-parallel rank holds whole. Upstream's writes it into
    checkpoints as if every rank were the first."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


class KeyNorm(torch.nn.Module):
    """LayerNorm over the indexer's keys in plain torch, with `weight` and `bias` [head]; computed in fp32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return torch.nn.functional.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


_IN_TORCH = {Linear: Replicated, Norm: KeyNorm}
"""Parts of an indexer that plain torch has other layers for."""


def block_spec(transformer: Any, *, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Spec of a decoder with `experimental_attention_variant` dsa."""
    block = get_transformer_block_with_experimental_attention_variant_spec(transformer, vp_stage=vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules.self_attention.submodules.core_attention.submodules.indexer.submodules
        for name, part in vars(parts).items():
            setattr(parts, name, _IN_TORCH.get(part, part))
    return block
