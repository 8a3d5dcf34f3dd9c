"""megatron-core's latent attention (MLA), built of the parts that its spec names. Written for megatron-core 0.19.2."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from slimx.adapters.megatron.attention import PackedAttention

_RESOLVED = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentAttention(MLASelfAttention):
    """MLASelfAttention whose spec is the last word.

    Upstream resolves norms and projections anew from the configuration (`QKNormConfigResolver`): a projection that is
    not the backend's own class would silently become the backend's, and a query projection without a low rank would get
    a norm that no model here has."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _RESOLVED}

    def _run_core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Upstream pads values to the width of queries, which Transformer Engine needs and PackedAttention does not."""
        if isinstance(self.core_attention, PackedAttention):
            return self.core_attention(query, key, value, *args, **kwargs)
        return super()._run_core_attention(query, key, value, *args, **kwargs)


def install(block: Any) -> None:
    """Have the latent attention of a decoder's spec (TransformerBlockSubmodules) built with this class."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentAttention
