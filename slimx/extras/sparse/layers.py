"""Sparse attention (DSA, 2512.02556, section 2.1) as a kind of layers: latent attention to tokens that an indexer
chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimx.config.sections.trainer import Trainer
from slimx.models.fields import Fields
from slimx.models.layer_kind import LayerKind, LayerParts, Packing, SequenceFlops

FP32 = INT32 = 4
_INDEXER_ROWS = 8192
"""Queries whose scores megatron-core's fused indexer holds at once (`fused_indexer_block_size`)."""


@dataclass(frozen=True)
class SparseAttention(LayerKind):
    """Sparse attention in every layer. A layer without an indexer sees the tokens that the last one before it chose."""

    indexers: tuple[bool, ...]
    """True for layers with an indexer."""

    unproven = {"megatron-core's experimental attention": ("trainer.offload_activations",)}
    fuses_rotation = False

    def attention_flops(self, model: Mapping[str, Any], layers: int, pairs: int) -> SequenceFlops:
        """Counts products of each query with the tokens that the indexer chooses, and the indexer's with every earlier
        token, which have no backward pass. The former are with the latents themselves: each query chooses other tokens,
        of which the heads share one key."""
        rank, heads = model["kv_lora_rank"], model["num_attention_heads"]
        pairs = heads * (2 * rank + model["qk_pos_emb_head_dim"])
        choosing, head, hidden = model["dsa_indexer_n_heads"], model["dsa_indexer_head_dim"], model["hidden_size"]
        read = model["q_lora_rank"] * choosing * head + hidden * (head + choosing)
        scored = choosing * (head + 1)  # dimensions of a pair's score, the sum over heads included
        linear = 3 * 2 * layers * pairs * model["dsa_indexer_topk"] + 2 * sum(self.indexers) * read
        return SequenceFlops(linear=linear, quadratic=2 * sum(self.indexers) * scored / 2)

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
            core = s.tokens * heads * FP32
            core += 0 if self.shares else s.tokens * model["dsa_indexer_topk"] * FP32
            core_work = (query + key + latent) * s.itemsize + seen * min(s.tokens, _INDEXER_ROWS) * FP32
        return {
            "attention_input": s.share * model["hidden_size"] * s.itemsize + s.norm(latents) + latents * s.itemsize,
            "projected": projected,
            "up_projected": projected,
            "core": core,
            "core_work": core_work,
            "context": value * s.itemsize,
        }

    @property
    def shares(self) -> bool:
        """True if some layers have no indexer."""
        return not all(self.indexers)

    def microbatch_bytes(self, model: Mapping[str, Any], setting: Any, layers: Sequence[int]) -> float:
        """Counts choices that layers share: megatron-core keeps them with the bounds of the sequences, in torch as
        int64."""
        if not self.shares:
            return 0.0
        chosen = min(model["dsa_indexer_topk"], setting.tokens * setting.sizes.context) * setting.tokens
        return sum(self.indexers[layer] for layer in layers) * chosen * (2 * FP32 if setting.materialised else FP32)

    def stage_starts(self, layers: int) -> Sequence[int]:
        return [layer for layer, chooses in enumerate(self.indexers) if chooses]

    def materialises(self, trainer: Trainer) -> bool:
        return trainer.megatron.get("dsa_kernel_backend", "none") == "none"

    def cache_bytes(self, model: Mapping[str, Any]) -> int:
        """Counts the indexer's key: fp8 with a scale of four bytes per 128 elements, whatever the cache is."""
        key = model["dsa_indexer_head_dim"]
        return key + key // 128 * 4

    def replay_bytes(self, model: Mapping[str, Any], tokens: int, length: int, layers: Sequence[int]) -> int:
        choices = sum(self.indexers[layer] for layer in layers)
        return INT32 * min(model["dsa_indexer_topk"], length) * tokens * choices

    def split_rules(self) -> tuple[Any, ...]:
        from slimx.extras.sparse.rules import stages_begin_with_an_indexer

        return (stages_begin_with_an_indexer,)

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


def indexers(hf: Fields) -> tuple[bool, ...]:
    """Returns True for each layer that has an indexer, as transformers and SGLang read config.json: by its
    `indexer_types`, else by `index_topk_pattern`, else every `index_topk_freq` layers after the first
    `index_skip_topk_offset` (2)."""
    layers, types, pattern = hf["num_hidden_layers"], hf.get("indexer_types"), hf.get("index_topk_pattern")
    types = types or pattern
    period, offset = hf.get("index_topk_freq") or 1, hf.get("index_skip_topk_offset")
    if types:
        if odd := {*types} - {"full", "shared", "F", "S"}:
            raise ValueError(f"{sharing_field(hf)} has a layer of type {min(odd)}")
        if len(types) != layers:
            raise ValueError(f"{sharing_field(hf)} has {len(types)} layers of {layers}")
        return tuple(kind in ("full", "F") for kind in types)
    first = 2 if offset is None else max(offset, 1)
    return tuple(max(layer - first + 1, 0) % period == 0 for layer in range(layers))


def sharing_field(hf: Fields) -> str:
    """Returns the field of config.json that `indexers` goes by."""
    return next((name for name in ("indexer_types", "index_topk_pattern") if hf.get(name)), "index_topk_freq")


def period(has: tuple[bool, ...]) -> tuple[int, int] | None:
    """Returns `dsa_indexer_topk_freq` and `dsa_indexer_skip_topk_offset` of megatron-core for layers of which those in
    which `has` is true have an indexer; None if no two numbers stand for them."""
    for offset in range(1, len(has) + 1):
        for every in range(1, len(has) + 1):
            if has == tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(len(has))):
                return every, offset
    return None


def layer_kind(hf: Fields) -> LayerKind:
    """Returns the kind of a model of DeepSeek-V3.2's shape."""
    return SparseAttention(indexers(hf))
