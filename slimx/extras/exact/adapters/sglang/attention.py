"""Attention backend of exact mode in an SGLang server: SGLang's torch backend with the kernels of exact mode.

Written for sglang 0.5.23, whose torch backend still manages the KV cache.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from slimx.extras.exact import operations as exact
from slimx.extras.exact.adapters.sglang import ATTENTION


class ExactAttention:
    """Mixin for SGLang's torch backend that computes attention with exact mode's kernels."""

    calls: Counter[str]
    """Number of attention kernel calls, under the key ATTENTION; shows that SGLang uses this backend."""
    token_to_kv_pool: Any
    req_to_token_pool: Any
    swa_out_cache_loc: Any

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
        """Computes attention of a prefill batch into `output` and returns it. `query`, `output` [tokens, heads, d];
        `keys`, `values`: the KV cache, [slots, groups, d]; `table` [rows, positions]: cache slot of each token of each
        request. For each request: `requests` is its row in the table, `lengths` its number of tokens, of which `before`
        were cached and `added` are new."""
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
        """Computes attention of a decode batch, one token per request, into `output` and returns it. The other
        parameters are those of `_run_sdpa_forward_extend`."""
        begin = requests.long() * table.shape[1]
        return output.copy_(self._attend(query, keys, values, table, begin, lengths.long(), scaling))

    def attend_latent(self, attention: Any, query: torch.Tensor, key: torch.Tensor, batch: Any) -> torch.Tensor:
        """Writes `key` [T, 1, latent + rotated] to the cache, then computes latent attention [T, heads, dv] of `query`
        [T, heads, content + rotated] over keys and values projected from the cached latents. `attention`: SGLang's MLA
        layer; `batch`: SGLang's forward batch."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

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


def attention_class() -> type:
    """Returns the class of the attention backend. It is created here because its base class, SGLang's torch backend,
    can be imported only where SGLang is installed."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class ExactAttentionBackend(ExactAttention, TorchNativeAttnBackend):
        """SGLang's torch backend with exact mode's kernels."""

        def __init__(self, runner: Any, calls: Counter[str]):
            super().__init__(runner)
            self.calls = calls

    return ExactAttentionBackend


def _reads(before: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for each new token in the order of requests, its request's index in the batch, and the number of tokens
    to which it attends. `before`, `added`: number of cached and of new tokens of each request, [requests]."""
    indices = torch.arange(len(added), device=added.device).repeat_interleave(added)
    first = added.cumsum(0) - added
    return indices, before[indices] + torch.arange(len(indices), device=added.device) - first[indices] + 1
