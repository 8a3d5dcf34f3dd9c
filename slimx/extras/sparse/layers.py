"""Kind of decoder layers with sparse attention (DSA, 2512.02556, section 2.1): latent attention to tokens that an
indexer selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimx.config.sections.trainer import Trainer
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import LayerKind, LayerParts, Packing, SequenceFlops

FP32 = INT32 = 4
_INDEXER_ROWS = 8192
"""Number of queries that megatron-core's fused indexer processes at a time (`fused_indexer_block_size`)."""


@dataclass(frozen=True)
class SparseAttention(LayerKind):
    """Decoder with sparse attention in every layer. A layer without an indexer attends to the tokens selected by the
    closest earlier layer that has one."""

    indexers: tuple[bool, ...]
    """One entry per layer, in order: True if the layer has an indexer."""

    unproven = {"megatron-core's experimental attention": ("trainer.offload_activations",)}
    fuses_rotation = False

    def attention_flops(self, model: Mapping[str, Any], layers: int, pairs: int) -> SequenceFlops:
        """Returns the FLOPs of attention to the selected tokens, and of the indexers, which score every earlier token
        and have no backward pass. Attention multiplies queries by latents, because each query selects different tokens
        and all heads share one key per token. `pairs` is ignored."""
        rank = model["kv_lora_rank"]
        pairs = model["num_attention_heads"] * (2 * rank + model["qk_pos_emb_head_dim"])
        choosing = model["dsa_indexer_n_heads"]
        head = model["dsa_indexer_head_dim"]
        hidden = model["hidden_size"]
        read = model["q_lora_rank"] * choosing * head + hidden * (head + choosing)
        scored = choosing * (head + 1)  # dimensions of the score of one pair of tokens, including the sum over heads
        linear = 3 * 2 * layers * pairs * model["dsa_indexer_topk"] + 2 * sum(self.indexers) * read
        return SequenceFlops(linear=linear, quadratic=2 * sum(self.indexers) * scored / 2)

    def mixer_bytes(self, model: Mapping[str, Any], setting: Any, parts: LayerParts) -> dict[str, float]:
        """Returns the size in bytes of one layer's attention activations, by field of `LayerBytes`.

        Without a fused kernel (`setting.materialized`), scores are computed for every pair of tokens in the
        micro-batch, even of different sequences, and every rank computes the scores of all indexer heads."""
        itemsize = setting.itemsize
        tokens = setting.tokens
        rank = model["kv_lora_rank"]
        heads = model["num_attention_heads"] / setting.sizes.tensor
        wide = rank + model["qk_pos_emb_head_dim"]
        seen = tokens * setting.sizes.context
        query = tokens * heads * wide
        key = seen * wide
        latent = tokens * heads * rank
        value = tokens * heads * model["v_head_dim"]
        latents = setting.share * (model["q_lora_rank"] + rank)
        # Queries before they are multiplied by the latents' up projection, and attention's output before its
        # projection.
        projected = (tokens * heads * model["qk_head_dim"] + latent) * itemsize
        scores = model["dsa_indexer_n_heads"] * seen * FP32  # bytes for one query
        if setting.materialized:
            pairs = heads * tokens * seen * FP32
            core = (query + key) * FP32 + pairs
            if itemsize < FP32:
                core += pairs / FP32 * itemsize
            core_work = max(2 * pairs, 3 * scores * tokens)
        else:
            projected += (query + key) * itemsize
            core = tokens * heads * FP32
            if not self.shares:
                core += tokens * model["dsa_indexer_topk"] * FP32
            core_work = (query + key + latent) * itemsize + seen * min(tokens, _INDEXER_ROWS) * FP32
        return {
            "attention_input": setting.share * model["hidden_size"] * itemsize
            + setting.norm(latents)
            + latents * itemsize,
            "projected": projected,
            "up_projected": projected,
            "core": core,
            "core_work": core_work,
            "context": value * itemsize,
        }

    @property
    def shares(self) -> bool:
        """True if some layers have no indexer and therefore reuse the tokens that another layer's indexer selected."""
        return not all(self.indexers)

    def microbatch_bytes(self, model: Mapping[str, Any], setting: Any, layers: Sequence[int]) -> float:
        """Returns the size in bytes of the selected tokens that layers share, which megatron-core stores in the
        micro-batch's PackedSeqParams: int64 with plain torch, int32 with fused kernels."""
        if not self.shares:
            return 0.0
        chosen = min(model["dsa_indexer_topk"], setting.tokens * setting.sizes.context) * setting.tokens
        item = 2 * FP32 if setting.materialized else FP32
        return sum(self.indexers[layer] for layer in layers) * chosen * item

    def stage_starts(self, layers: int) -> Sequence[int]:
        return [layer for layer, chooses in enumerate(self.indexers) if chooses]

    def materializes(self, trainer: Trainer) -> bool:
        return trainer.megatron.get("dsa_kernel_backend", "none") == "none"

    def cache_bytes(self, model: Mapping[str, Any]) -> int:
        """Returns the size in bytes of the indexer's key per token and layer. The key is fp8 with a scale of four bytes
        per 128 elements, regardless of the KV cache's dtype."""
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
        """Yields the parameters of an indexer's key norm, which are fp32 in checkpoints and engines."""
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer

        if isinstance(module, DSAIndexer):
            yield from module.k_norm.parameters()

    def recorder(self, trainer: Trainer) -> Callable[[], Packing] | None:
        """Returns a function that creates one callable per micro-batch if `trainer.indexer_replay` is R2; otherwise
        None. The SparseSequences objects that one such callable creates share one record of selected tokens, so that
        later passes can replay them."""
        if trainer.indexer_replay != "R2":
            return None
        from slimx.extras.sparse.adapters.megatron.sparse import SparseSequences

        return lambda: partial(SparseSequences, chosen={})


def indexers(hf: HfConfig) -> tuple[bool, ...]:
    """Returns, for each layer, True if it has an indexer. Reads config.json as transformers and SGLang do: the field
    `indexer_types`, or else `index_topk_pattern`. If neither is set, the first `index_skip_topk_offset` layers (default
    2) and every `index_topk_freq`-th layer after them have an indexer. Raises ValueError for an unknown type or a wrong
    number of layers."""
    layers = hf["num_hidden_layers"]
    pattern = hf.get("index_topk_pattern")
    types = hf.get("indexer_types") or pattern
    interval = hf.get("index_topk_freq") or 1
    offset = hf.get("index_skip_topk_offset")
    if types:
        odd = {*types} - {"full", "shared", "F", "S"}
        if odd:
            raise ValueError(f"{sharing_field(hf)} has a layer of the unknown type {min(odd)}")
        if len(types) != layers:
            raise ValueError(f"{sharing_field(hf)} has {len(types)} entries, but num_hidden_layers is {layers}")
        return tuple(kind in ("full", "F") for kind in types)
    return _periodic(layers, interval, 2 if offset is None else max(offset, 1))


def _periodic(layers: int, interval: int, offset: int) -> tuple[bool, ...]:
    return tuple(max(layer - offset + 1, 0) % interval == 0 for layer in range(layers))


def sharing_field(hf: HfConfig) -> str:
    """Returns the name of the config.json field that determines which layers have an indexer (see `indexers`)."""
    return next((name for name in ("indexer_types", "index_topk_pattern") if hf.get(name)), "index_topk_freq")


def period(with_indexer: tuple[bool, ...]) -> tuple[int, int] | None:
    """Returns the values of megatron-core's `dsa_indexer_topk_freq` and `dsa_indexer_skip_topk_offset` for which
    exactly the layers that are True in `with_indexer` have an indexer; None if there are no such values."""
    layers = len(with_indexer)
    for offset in range(1, layers + 1):
        for interval in range(1, layers + 1):
            if with_indexer == _periodic(layers, interval, offset):
                return interval, offset
    return None


def layer_kind(hf: HfConfig) -> LayerKind:
    """Returns the description of the decoder layers of DeepSeek-V3.2 and GLM-5, including the layers that have an
    indexer."""
    return SparseAttention(indexers(hf))
