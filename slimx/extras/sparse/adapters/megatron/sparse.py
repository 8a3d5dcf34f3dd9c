"""megatron-core's sparse attention (DSA) over packed sequences, extended to record and replay the indexer's selected
tokens. Written for megatron-core 0.19.2."""

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
    """Linear layer of an indexer that every tensor-parallel rank stores completely. megatron-core's duplicated Linear
    would write checkpoints as if every rank were the first, so this class sets the tensor-parallel group."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


class KeyNorm(torch.nn.Module):
    """LayerNorm of an indexer's keys in plain torch, with parameters `weight` and `bias` [head dimensions]. Computes in
    fp32."""

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
"""Layer number, from 1 as in megatron-core -> tokens to which the queries of one micro-batch attend in that layer:
int32 [1, T, k] in host memory, positions in the pack (-1: none) for the T queries on this context-parallel rank."""


@dataclass
class SparseSequences(PackedSeqParams):
    """Bounds of a micro-batch's sequences, and the tokens that the layers' indexers selected for the micro-batch. A
    layer that is in `chosen` replays its selected tokens; any other layer selects tokens and adds them to `chosen`."""

    chosen: ChosenTokens = field(default_factory=dict)


class ReplayableAttention(DSAttention):
    """megatron-core's DSAttention, extended to record the tokens that the indexer selects, and to replay them
    (`SparseSequences`).

    It uses upstream's support for layers that share another layer's selected tokens. Such layers read the tokens from a
    dictionary in the micro-batch's PackedSeqParams instead of running the indexer, and avoid the only fused kernel that
    does not return the tokens it selects. To replay, a layer reads its recorded tokens from that dictionary.
    Recomputation gets the same PackedSeqParams object, and therefore the same tokens.
    """

    index_share: bool
    skip_topk: bool

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._shares = self.index_share
        self._chooses = not self.skip_topk

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> torch.Tensor:
        """Computes sparse attention of this rank's heads. If `packed_seq_params` is a SparseSequences, records the
        selected tokens in it, or replays them."""
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
        # Later layers that share the selected tokens read them, too, also during recomputation.
        choice = shared[self.layer_number] if self._shares else shared.pop(self.layer_number)
        # Kernels that need the number of each query's selected tokens compute it if it is not stored.
        self._get_index_share_topk_length_holder(packed_seq_params).pop(self.layer_number, None)
        if not self.skip_topk:
            host = torch.empty(choice.shape, dtype=torch.int32, pin_memory=choice.is_cuda)
            chosen[self.layer_number] = host.copy_(choice)
        return output


_IN_TORCH = {Linear: Replicated, Norm: KeyNorm}
"""Replacements for an indexer's submodules: class in megatron-core's spec -> class that replaces it."""


def block_spec(transformer: Any, *, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Returns the spec of a decoder with sparse attention (`experimental_attention_variant` dsa). `vp_stage`: index of
    the virtual pipeline stage; None without virtual stages."""
    block = get_transformer_block_with_experimental_attention_variant_spec(transformer, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules.core_attention
        attention.module = ReplayableAttention
        parts = attention.submodules.indexer.submodules
        for name, part in vars(parts).items():
            setattr(parts, name, _IN_TORCH.get(part, part))
    return block
