"""Latent attention (DeepSeek-V3's MLA) of an SGLang server in exact mode. Written for sglang 0.5.23.

SGLang's CPU path applies the up projection to queries and outputs ("absorbed" attention), which rounds differently from
a trainer. Here, as in training, keys and values are projected from the cached latents for every token to which a step
attends. The cache has the same contents as SGLang's, except for the order of the rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin"
PREPARE = f"{_MLA}.forward_absorb_prepare"
CORE = f"{_MLA}.forward_absorb_core"


def is_latent(kinds: set[str]) -> bool:
    """Returns True if `kinds`, the class names of a model's modules, include latent attention."""
    return "DeepseekV2AttentionMLA" in kinds


class LatentOperations:
    """Operations of a server's latent attention.

    `rotate`: function (rotary module, positions [T], query [T, heads, d], key [T, 1, d]) that applies the rotary
    embedding to the pairs (i, i + d / 2).
    """

    def __init__(self, rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]):
        self.rotate = rotate

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Returns the replacement functions for SGLang's HookRegistry, by dotted name of the function that each
        replaces."""
        return {PREPARE: self.prepare, CORE: self.attend}

    def used(self, kinds: set[str]) -> set[str]:
        """Returns the dotted names of those functions replaced by exact mode that a model calls. `kinds`: class names
        of the model's modules."""
        return {PREPARE, CORE} if is_latent(kinds) else set()

    def prepare(self, attention: Any, positions: torch.Tensor, hidden: torch.Tensor, batch: Any, *_: Any) -> tuple:
        """Computes the arguments of `attend` from `hidden` [T, hidden]: query [T, heads, content + rotated], the key to
        cache [T, 1, latent + rotated], and `batch`."""
        from sglang.srt.layers.layer_boundary import get_attn_tp_context

        latent = attention.kv_lora_rank
        rotated = attention.qk_rope_head_dim
        if attention.q_lora_rank is None:
            query = attention.q_proj(hidden)[0]
            down = attention.kv_a_proj_with_mqa(hidden)[0]
        else:
            both = get_attn_tp_context().fetch_qkv_latent()
            query, down = both.split([attention.q_lora_rank, latent + rotated], dim=-1)
            query = attention.q_b_proj(attention.q_a_layernorm(query.contiguous()))[0]
        query = query.view(len(query), attention.num_local_heads, attention.qk_head_dim)
        content = attention.kv_a_layernorm(down[:, :latent].contiguous())
        query_end = _pairs_as_halves(query[..., -rotated:])
        key_end = _pairs_as_halves(down[:, None, latent:])
        query_end, key = self.rotate(attention.rotary_emb, positions, query_end, key_end)
        query = torch.cat((query[..., :-rotated], query_end), dim=-1)
        return query, torch.cat((content[:, None], key), dim=-1), batch

    def attend(self, attention: Any, query: torch.Tensor, key: torch.Tensor, batch: Any) -> torch.Tensor:
        """Writes `key` to the KV cache and computes attention; returns the output projection's result [T, hidden]."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        mixed = get_attn_backend().attend_latent(attention, query, key, batch)
        return attention.o_proj(mixed.flatten(1))[0]


def _pairs_as_halves(x: torch.Tensor) -> torch.Tensor:
    """Reorders the last dimension from adjacent pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...)."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
