"""Attention backend of exact mode in an SGLang server. Written for sglang 0.5.23.

SGLang's torch backend with a different kernel: it still manages the KV cache.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from slimx.extras.exact import operations as exact
from slimx.extras.exact.adapters.sglang import ATTENTION


def attention_class() -> type:
    """Returns a subclass of SGLang's torch backend, which is importable only where SGLang is installed."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class ExactAttentionBackend(TorchNativeAttnBackend):
        """The backend. `calls` counts its kernels under ATTENTION."""

        def __init__(self, runner: Any, calls: Counter[str]):
            super().__init__(runner)
            self.calls = calls

        def _run_sdpa_forward_extend(
            self,
            query: torch.Tensor,
            output: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            table: torch.Tensor,
            requests: torch.Tensor,
            lengths: torch.Tensor,
            before: torch.Tensor,
            added: torch.Tensor,
            *_: Any,
            scaling: float,
            **__: Any,
        ) -> torch.Tensor:
            """Computes attention of prefills. query, output [tokens, heads, d]; keys, values [slots, groups, d]; table
            [requests, positions] of slots; per request: its row in the table, its length, and its numbers of cached and
            of added tokens."""
            indices, seen = _reads(before.long(), added.long())
            begin = requests.long()[indices] * table.shape[1]
            return output.copy_(self._attend(query, keys, values, table, begin, seen, scaling))

        def _run_sdpa_forward_decode(
            self,
            query: torch.Tensor,
            output: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            table: torch.Tensor,
            requests: torch.Tensor,
            lengths: torch.Tensor,
            *_: Any,
            scaling: float,
            **__: Any,
        ) -> torch.Tensor:
            """Computes the same for one token of each request."""
            begin = requests.long() * table.shape[1]
            return output.copy_(self._attend(query, keys, values, table, begin, lengths.long(), scaling))

        def attend_latent(self, attention: Any, query: torch.Tensor, key: torch.Tensor, batch: Any) -> torch.Tensor:
            """Computes latent attention: query [T, heads, content + rotated] reads keys and values projected from the
            cached latents, after `key` [T, 1, latent + rotated] is written to the cache: [T, heads, dv]."""
            pool = self.token_to_kv_pool
            table = self.req_to_token_pool.req_to_token
            layer = attention.attn_mqa
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), key, key)
            lengths = batch.seq_lens.long()
            slots = [table[r, :n] for r, n in zip(batch.req_pool_indices.tolist(), lengths.tolist(), strict=True)]
            cached = pool.get_key_buffer(layer.layer_id)[torch.cat(slots)]
            heads = query.shape[1]
            latent = attention.kv_lora_rank
            projected = attention.kv_b_proj(cached[:, 0, :latent].contiguous())[0].view(len(cached), heads, -1)
            content, value = projected.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=-1)
            keys = torch.cat((content, cached[:, :, latent:].expand(-1, heads, -1)), dim=-1)
            if batch.forward_mode.is_decode():
                indices = torch.arange(len(lengths), device=lengths.device)
                seen = lengths
            else:
                indices, seen = _reads(batch.extend_prefix_lens.long(), batch.extend_seq_lens.long())
            begin = (lengths.cumsum(0) - lengths)[indices]
            return self._attend(
                query, keys, value, torch.arange(len(keys), device=keys.device), begin, seen, attention.scaling
            )

        def _attend(
            self,
            query: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            index: torch.Tensor,
            begin: torch.Tensor,
            seen: torch.Tensor,
            scale: float,
        ) -> torch.Tensor:
            self.calls[ATTENTION] += 1
            return exact.gathered_attention(query, keys, values, index.int(), begin, seen, scale)

    return ExactAttentionBackend


def _reads(before: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for every added token, request after request, its request's index in the batch and the number of tokens
    that it attends to. before, added [requests]: numbers of cached and of added tokens."""
    indices = torch.arange(len(added), device=added.device).repeat_interleave(added)
    first = added.cumsum(0) - added
    return indices, before[indices] + torch.arange(len(indices), device=added.device) - first[indices] + 1
