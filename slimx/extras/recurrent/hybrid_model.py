"""megatron-core's HybridModel with the outputs that policy training needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams

from slimx.trainer.model.policy_model import PolicyOutput


class HybridPolicyModel(PolicyOutput, HybridModel):
    """megatron-core's HybridModel for policy training: its forward pass returns the outputs of PolicyModel instead of
    logits or a loss. Written for megatron-core 0.19.2."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None,
        *,
        labels: Any = None,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Any:
        """Computes the same outputs as PolicyModel's forward pass. `input_ids` [1, T]: packed sequences, which every
        pipeline stage must receive."""
        # With total_tokens set, PackedSeqParams computes each token's sequence index, which Mamba-2 layers need instead
        # of bounds.
        packed = replace(packed_seq_params, total_tokens=input_ids.shape[1] * self.config.context_parallel_size)
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        hidden = self.decoder(hidden_states=embedded, attention_mask=attention_mask, packed_seq_params=packed)
        return self._postprocess(hidden, input_ids, position_ids, labels, None, None, None)


def segments(pattern: str, layers: Sequence[int], stages: int) -> str:
    """Returns `pattern`, one character per layer, with a | between pipeline stages. `layers`: number of layers in each
    stage; empty: `stages` stages of equal length."""
    counts = layers or [len(pattern) // stages] * stages
    cut = []
    start = 0
    for count in counts:
        cut.append(pattern[start : start + count])
        start += count
    return "|".join(cut)
