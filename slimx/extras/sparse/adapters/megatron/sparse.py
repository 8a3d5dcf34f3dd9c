"""Sparse attention (DSA) of megatron-core over packed sequences. Written for megatron-core 0.19.2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slimx.adapters.megatron.layers import Norm


class Replicated(Linear):
    """The duplicated Linear of an indexer, complete on each tensor-parallel rank. Upstream's writes checkpoints as if
    every rank were the first."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


class KeyNorm(torch.nn.Module):
    """LayerNorm of the indexer's keys in plain torch, with `weight` and `bias` [head]; computed in fp32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float()
        bias = self.bias.float()
        return torch.nn.functional.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


ChosenTokens = dict[int, torch.Tensor]
"""Tokens that the queries of one micro-batch attend to, by layer number (from 1, as in megatron-core): int32 [1, T, k]
in host memory, positions in the pack (-1: none) for the T queries of this context-parallel rank."""


@dataclass
class SparseSequences(PackedSeqParams):
    """Bounds of a micro-batch's sequences, with the tokens that sparse attention reads. A layer that is not in `chosen`
    adds its choice; the others replay theirs."""

    chosen: ChosenTokens = field(default_factory=dict)


class ReplayableAttention(DSAttention):
    """DSAttention that can record the indexer's choice of tokens and replay it (`SparseSequences`).

    Built on upstream's layers that share a choice: they read it from a dictionary in the micro-batch's PackedSeqParams,
    do not run the indexer, and avoid the one fused kernel that does not return its choice. A layer that replays is its
    own source in that dictionary. Recomputation gets the same object and therefore the same choice.
    """

    index_share: bool
    skip_topk: bool

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._shares = self.index_share
        self._chooses = not self.skip_topk

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> torch.Tensor:
        """Computes attention of the local heads."""
        chosen = packed_seq_params.chosen if isinstance(packed_seq_params, SparseSequences) else None
        if self._chooses:
            self.index_share = self._shares or chosen is not None
            self.skip_topk = chosen is not None and self.layer_number in chosen
        if chosen is None or not self._chooses:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        shared = self._get_index_share_topk_holder(packed_seq_params)
        if self.skip_topk:
            shared[self.layer_number] = chosen[self.layer_number].to(kwargs["x"].device, non_blocking=True)
        output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        # Later layers that share the choice, and their recomputation, also read it.
        choice = shared[self.layer_number] if self._shares else shared.pop(self.layer_number)
        # Kernels that need the length of each choice compute it if none is stored.
        self._get_index_share_topk_length_holder(packed_seq_params).pop(self.layer_number, None)
        if not self.skip_topk:
            host = torch.empty(choice.shape, dtype=torch.int32, pin_memory=choice.is_cuda)
            chosen[self.layer_number] = host.copy_(choice)
        return output


_IN_TORCH = {Linear: Replicated, Norm: KeyNorm}
"""Parts of an indexer with a replacement in plain torch."""


def block_spec(transformer: Any, *, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Returns the spec of a decoder with `experimental_attention_variant` dsa."""
    block = get_transformer_block_with_experimental_attention_variant_spec(transformer, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules.core_attention
        attention.module = ReplayableAttention
        parts = attention.submodules.indexer.submodules
        for name, part in vars(parts).items():
            setattr(parts, name, _IN_TORCH.get(part, part))
    return block
