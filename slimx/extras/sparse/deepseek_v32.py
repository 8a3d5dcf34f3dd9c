"""The DeepSeek-V3.2 family (V3.2-Exp, V3.2): a DeepSeek-V3 whose attention is sparse (DSA, 2512.02556, section 2.1).

In every layer an indexer scores each earlier token of the sequence for each query, and the latent attention sees the
`index_topk` tokens with the highest scores only. It rotates the first dimensions of its heads in halves, where the
attention rotates pairs. The choice has no gradient: the indexer stays as the checkpoint has it (`UNTRAINED`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from slimx.extras.families import deepseek_v3, deepseek_v3_engine
from slimx.extras.families.deepseek_v3 import gpt_arguments as gpt_arguments
from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.extras.families.prediction import table_with_prediction
from slimx.extras.families.sigmoid_router import unsupported_places
from slimx.extras.sparse.layers import indexers, period, sharing_field
from slimx.extras.sparse.layers import layer_kind as layer_kind
from slimx.layout.table import Row, Table
from slimx.models import engine_rows
from slimx.models.fields import Fields
from slimx.models.rows import Layer

ARCHITECTURE = "DeepseekV32ForCausalLM"
NO_CPU_ENGINE = "its indexer and its sparse attention are CUDA kernels there"
UNTRAINED = ("*.core_attention.indexer.*",)
"""Parameters that no loss of slimx reaches: they have no gradient and no optimizer state."""


def transformer_config(hf: Fields, *, interleaved: bool = False) -> dict[str, Any]:
    """Fields of megatron-core's MLATransformerConfig that define the model (no parallelism, no dtype). `interleaved`:
    the indexer rotates pairs."""
    every, offset = period(indexers(hf)) or (1, 0)
    return {
        **deepseek_v3.transformer_config(hf),
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": hf["index_n_heads"],
        "dsa_indexer_head_dim": hf["index_head_dim"],
        "dsa_indexer_topk": hf["index_topk"],
        "dsa_indexer_topk_freq": every,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rope_interleaved": interleaved,
        # DeepSeek's own code turns queries and keys by a Hadamard matrix before it rounds them to fp8. The products are
        # the same without: the matrix is orthogonal.
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_k_norm_fp32": True,
        # The only way in which megatron-core's sparse attention knows context parallelism.
        "cp_comm_type": "allgather",
    }


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    if hf.get("indexer_rope_interleave"):
        return "indexer_rope_interleave true"
    if not all(indexers(hf)):
        return f"{sharing_field(hf)} with layers that share a choice of tokens"
    return unsupported_sparse(hf) or deepseek_v3.unsupported(hf)


def unsupported_sparse(hf: Fields) -> str | None:
    """Name the part of the sparse attention that cannot be built; None if all can."""
    if hf["q_lora_rank"] is None:
        return "q_lora_rank null, the latent that the indexer's queries are made of,"
    if hf["index_head_dim"] < hf["qk_rope_head_dim"]:
        return f"index_head_dim {hf['index_head_dim']}, less than qk_rope_head_dim {hf['qk_rope_head_dim']}"
    if set(hf.get("layer_types") or ()) - {"indexed_attention"}:
        return "layer_types other than indexed_attention"
    if not (has := indexers(hf))[0] or period(has) is None:
        return f"{sharing_field(hf)} whose layers share choices of tokens without a period"
    if not all(has) and mtp_layers(hf) > 1:
        # megatron-core would apply the period to them, from layer 1 on.
        return f"num_nextn_predict_layers {mtp_layers(hf)} where layers share a choice of tokens"
    hf.get("index_share_for_mtp_iteration")  # how layers of multi-token prediction draft, several times in an engine
    return unsupported_places(hf)


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor, for a model with `mtp` layers of multi-token prediction."""
    return table_with_prediction(hf, partial(_attention, hf), mtp=mtp)


def engine_table(hf: Fields, *, fused_shared_experts: bool = False) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor (`sglang.srt.models.deepseek_v2`)."""

    def indexer(at: Layer) -> tuple[Row, ...]:
        heads, head, hidden = hf["index_n_heads"], hf["index_head_dim"], hf["hidden_size"]
        return (
            *engine_indexer(hf, at),
            engine_rows.same(at, "self_attn.indexer.wk", head, hidden, quantised=True),
            engine_rows.same(at, "self_attn.indexer.weights_proj", heads, hidden, dtype="bfloat16"),
        )

    return deepseek_v3_engine.engine_table(hf, fused_shared_experts=fused_shared_experts, beside=indexer)


def engine_indexer(hf: Fields, at: Layer) -> tuple[Row, ...]:
    """The part of an indexer that SGLang holds alike for all models, whole on every rank."""
    wide, norm = hf["index_n_heads"] * hf["index_head_dim"], [("self_attn.indexer.k_norm", (hf["index_head_dim"],))]
    return (
        engine_rows.same(at, "self_attn.indexer.wq_b", wide, hf["q_lora_rank"], quantised=True),
        *(at.row(f"self_attn.indexer.k_norm.{kind}", norm, kind=kind, dtype="float32") for kind in ("weight", "bias")),
    )


def _attention(hf: Fields, at: Layer) -> tuple[Row, ...]:
    """Latent attention whose norms stand alone, because the indexer takes the query's normed latent, and the indexer,
    which every tensor-parallel rank holds whole."""
    return *deepseek_v3.attention(hf, at, fused=False), *_indexer(hf, with_indexers(hf, at))


def with_indexers(hf: Fields, at: Layer) -> Layer:
    """The layers of `at` that have an indexer: each layer of multi-token prediction does."""
    if at.stage == "mtp" or all(indexers(hf)):
        return at
    layers = range(hf["num_hidden_layers"]) if at.layers is None else at.layers
    return replace(at, layers=tuple(layer for layer in layers if indexers(hf)[layer]))


def _indexer(hf: Fields, at: Layer) -> tuple[Row, ...]:
    hidden, heads, head = hf["hidden_size"], hf["index_n_heads"], hf["index_head_dim"]
    here, there = "self_attention.core_attention.indexer.", "self_attn.indexer."
    return (
        at.linear(f"{here}linear_wq_b.weight", f"{there}wq_b", (heads * head, hf["q_lora_rank"])),
        at.linear(f"{here}linear_wk.weight", f"{there}wk", (head, hidden)),
        *(
            at.row(f"{here}k_norm.{kind}", [(f"{there}k_norm", (head,))], kind=kind, dtype="float32")
            for kind in ("weight", "bias")
        ),
        at.row(f"{here}linear_weights_proj.weight", [(f"{there}weights_proj", (heads, hidden))]),
    )
