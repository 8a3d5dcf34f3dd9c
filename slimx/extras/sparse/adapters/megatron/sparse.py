"""megatron-core's sparse attention (DSA) over packed sequences. Written for megatron-core 0.19.2."""

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


ChosenTokens = dict[int, torch.Tensor]
"""Tokens that the queries of one micro-batch see, by layer (from 1, as megatron-core counts): int32 [1, T, k] in host
memory, positions in the whole pack (-1: none) for the T queries of this context-parallel rank."""


@dataclass
class SparseSequences(PackedSeqParams):
    """Bounds of a micro-batch's sequences, with the tokens that sparse attention sees. A layer that is not among
    `chosen` adds its own choice; the others take theirs."""

    chosen: ChosenTokens = field(default_factory=dict)


class SparseAttention(DSAttention):
    """DSAttention that can keep the indexer's choice of tokens and take it again (`SparseSequences`).

    It rests on upstream's layers that share a choice: they read it from a dictionary on the micro-batch's
    PackedSeqParams, do not run the indexer, and leave out the one fused kernel that never shows its choice. A layer
    that replays finds itself there as its own source. Recomputation sees the same object, hence the same choice.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._shares, self._chooses = self.index_share, not self.skip_topk

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> torch.Tensor:
        """Attention of the local heads, as upstream's."""
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
        # Layers behind this one, and their recomputation, may want it too.
        taken = shared[self.layer_number] if self._shares else shared.pop(self.layer_number)
        # Kernels that want the length of each choice count it where none is kept.
        self._get_index_share_topk_length_holder(packed_seq_params).pop(self.layer_number, None)
        if not self.skip_topk:
            host = torch.empty(taken.shape, dtype=torch.int32, pin_memory=taken.is_cuda)
            chosen[self.layer_number] = host.copy_(taken)
        return output


_IN_TORCH = {Linear: Replicated, Norm: KeyNorm}
"""Parts of an indexer that plain torch has other layers for."""


def block_spec(transformer: Any, *, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Spec of a decoder with `experimental_attention_variant` dsa."""
    block = get_transformer_block_with_experimental_attention_variant_spec(transformer, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules.core_attention
        attention.module = SparseAttention
        parts = attention.submodules.indexer.submodules
        for name, part in vars(parts).items():
            setattr(parts, name, _IN_TORCH.get(part, part))
    return block
