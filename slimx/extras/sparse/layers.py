"""Sparse attention (DSA, 2512.02556, section 2.1) as a kind of layers: latent attention to tokens that an indexer
chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimx.config.sections.trainer import Trainer
from slimx.models.layer_kind import LayerKind, LayerParts, Packing, SequenceFlops

FP32 = INT32 = 4
_INDEXER_ROWS = 8192
"""Queries whose scores megatron-core's fused indexer holds at once (`fused_indexer_block_size`)."""


@dataclass(frozen=True)
class SparseAttention(LayerKind):
    """Sparse attention in every layer."""

    unproven = {"megatron-core's experimental attention": ("trainer.offload_activations",)}
    fuses_rotation = False

    def attention_flops(self, model: Mapping[str, Any], layers: int, pairs: int) -> SequenceFlops:
        """Counts products of each query with the tokens that the indexer chooses, and the indexer's with every earlier
        token, which have no backward pass. The former are with the latents themselves: each query chooses other tokens,
        of which the heads share one key."""
        rank, heads = model["kv_lora_rank"], model["num_attention_heads"]
        pairs = heads * (2 * rank + model["qk_pos_emb_head_dim"])
        indexers, head, hidden = model["dsa_indexer_n_heads"], model["dsa_indexer_head_dim"], model["hidden_size"]
        read = model["q_lora_rank"] * indexers * head + hidden * (head + indexers)
        scored = indexers * (head + 1)  # dimensions of a pair's score, the sum over heads included
        linear = 3 * 2 * layers * pairs * model["dsa_indexer_topk"] + 2 * layers * read
        return SequenceFlops(linear=linear, quadratic=2 * layers * scored / 2)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float]:
        """Without a fused kernel (`materialised`) scores are taken of every pair of the whole micro-batch, sequences
        apart or not, the indexer's too, of all its heads on every rank."""
        s, heads, rank = setting, model["num_attention_heads"] / setting.sizes.tensor, model["kv_lora_rank"]
        wide, seen = rank + model["qk_pos_emb_head_dim"], s.tokens * s.sizes.context
        query, key, latent = s.tokens * heads * wide, seen * wide, s.tokens * heads * rank
        value = s.tokens * heads * model["v_head_dim"]
        latents = s.share * (model["q_lora_rank"] + rank)
        # Queries before their products with the latents' projection, and the attention's output before its own.
        projected = (s.tokens * heads * model["qk_head_dim"] + latent) * s.itemsize
        scores = model["dsa_indexer_n_heads"] * seen * FP32  # of one query
        if s.materialised:
            pairs = heads * s.tokens * seen * FP32
            core = (query + key) * FP32 + pairs + (pairs / FP32 * s.itemsize if s.itemsize < FP32 else 0.0)
            core_work = max(2 * pairs, 3 * scores * s.tokens)
        else:
            projected += (query + key) * s.itemsize
            core = s.tokens * (model["dsa_indexer_topk"] + heads) * FP32
            core_work = (query + key + latent) * s.itemsize + seen * min(s.tokens, _INDEXER_ROWS) * FP32
        return {
            "attention_input": s.share * model["hidden_size"] * s.itemsize + s.norm(latents) + latents * s.itemsize,
            "projected": projected,
            "up_projected": projected,
            "core": core,
            "core_work": core_work,
            "context": value * s.itemsize,
        }

    def materialises(self, trainer: Trainer) -> bool:
        return trainer.megatron.get("dsa_kernel_backend", "none") == "none"

    def cache_bytes(self, model: Mapping[str, Any]) -> int:
        """Counts the indexer's key: fp8 with a scale of four bytes per 128 elements, whatever the cache is."""
        key = model["dsa_indexer_head_dim"]
        return key + key // 128 * 4

    def replay_bytes(self, model: Mapping[str, Any], tokens: int, length: int, layers: int) -> int:
        return INT32 * min(model["dsa_indexer_topk"], length) * tokens * layers

    def decoder_spec(self, transformer: Any, chunk: int | None) -> Any:
        from slimx.extras.sparse.adapters.megatron.sparse import block_spec

        return block_spec(transformer, vp_stage=chunk)

    def fp32_parameters(self, module: Any) -> Iterator[Any]:
        """Yields the norm of an indexer's keys, as checkpoints and engines have it."""
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer

        if isinstance(module, DSAIndexer):
            yield from module.k_norm.parameters()

    def recorder(self, trainer: Trainer) -> Callable[[], Packing] | None:
        """Records the tokens that queries see, with `trainer.indexer_replay` R2."""
        from slimx.extras.sparse.adapters.megatron.sparse import SparseSequences

        return (lambda: partial(SparseSequences, chosen={})) if trainer.indexer_replay == "R2" else None


def layer_kind(hf: Mapping[str, Any]) -> LayerKind:
    """Returns the kind of a model of DeepSeek-V3.2's shape."""
    return SparseAttention()
