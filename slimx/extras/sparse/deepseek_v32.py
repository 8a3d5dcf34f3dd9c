"""Family DeepSeek-V3.2 (V3.2-Exp, V3.2): DeepSeek-V3 with sparse attention (DSA, 2512.02556, section 2.1).

In every layer, an indexer scores all earlier tokens of the sequence for each query, and latent attention reads only the
`index_topk` tokens with the highest scores. The indexer's rotary embedding rotates the first dimensions of its heads,
as pairs from the two halves of these dimensions, whereas attention's rotates adjacent pairs. Selecting tokens has no
gradient, so the indexer is not trained (`UNTRAINED`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from slimx.extras.families import deepseek_v3, deepseek_v3_engine
from slimx.extras.families.deepseek_v3 import gpt_arguments as gpt_arguments
from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.extras.families.prediction import table_with_prediction
from slimx.extras.families.sigmoid_router import unsupported_layers
from slimx.extras.sparse.layers import indexers, period, sharing_field
from slimx.extras.sparse.layers import layer_kind as layer_kind
from slimx.layout.table import Row, Table
from slimx.models import engine_rows
from slimx.models.fields import HfConfig
from slimx.models.rows import Layer

ARCHITECTURE = "DeepseekV32ForCausalLM"
NO_CPU_ENGINE = "SGLang has indexers and sparse attention only as CUDA kernels"
UNTRAINED = ("*.core_attention.indexer.*",)
"""Glob patterns for the names of parameters that receive no gradient from any loss and therefore have no optimizer
state."""


def transformer_config(hf: HfConfig, *, interleaved: bool = False) -> dict[str, Any]:
    """Returns the fields of megatron-core's MLATransformerConfig that define the model; fields for parallelism and
    dtype are not included. `interleaved`: True if the indexer's rotary embedding rotates adjacent pairs."""
    interval, offset = period(indexers(hf)) or (1, 0)
    return {
        **deepseek_v3.transformer_config(hf),
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": hf["index_n_heads"],
        "dsa_indexer_head_dim": hf["index_head_dim"],
        "dsa_indexer_topk": hf["index_topk"],
        "dsa_indexer_topk_freq": interval,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rope_interleaved": interleaved,
        # DeepSeek's code multiplies the indexer's queries and keys by a Hadamard matrix before rounding them to fp8.
        # The matrix is orthogonal, so their products are the same without it.
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_k_norm_fp32": True,
        # megatron-core's sparse attention supports only this kind of context parallelism.
        "cp_comm_type": "allgather",
    }


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    if hf.get("indexer_rope_interleave"):
        return "indexer_rope_interleave true"
    if not all(indexers(hf)):
        return f"{sharing_field(hf)} with layers that share an indexer's selected tokens"
    return unsupported_sparse(hf) or deepseek_v3.unsupported(hf)


def unsupported_sparse(hf: HfConfig) -> str | None:
    """Returns a description of the first setting of sparse attention in config.json `hf` that slimx does not support;
    None if all are supported."""
    if hf["q_lora_rank"] is None:
        return "q_lora_rank null, although the indexer computes its queries from the query latent,"
    if hf["index_head_dim"] < hf["qk_rope_head_dim"]:
        return f"index_head_dim {hf['index_head_dim']}, less than qk_rope_head_dim {hf['qk_rope_head_dim']}"
    if set(hf.get("layer_types") or ()) - {"indexed_attention"}:
        return "layer_types other than indexed_attention"
    with_indexer = indexers(hf)
    if not with_indexer[0] or period(with_indexer) is None:
        return f"{sharing_field(hf)} with indexers in layers that are not periodic, or without one in the first layer,"
    if not all(with_indexer) and mtp_layers(hf) > 1:
        # megatron-core would apply the period to multi-token prediction layers, too, counted from layer 1.
        return f"num_nextn_predict_layers {mtp_layers(hf)} where layers share an indexer's selected tokens"
    hf.get("index_share_for_mtp_iteration")  # read and ignored, because it affects only an engine's draft iterations
    return unsupported_layers(hf)


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp`: number of multi-token prediction layers to train; further layers that the checkpoint declares are
    copied unchanged to exports (`Table.frozen`)."""
    return table_with_prediction(hf, partial(_attention, hf), mtp=mtp)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.deepseek_v2`). `fused_shared_experts`: True if SGLang stores the shared expert after the routed
    ones in the same parameters."""

    def indexer(layer: Layer) -> tuple[Row, ...]:
        heads = hf["index_n_heads"]
        head = hf["index_head_dim"]
        hidden = hf["hidden_size"]
        return (
            *engine_indexer(hf, layer),
            engine_rows.same(layer, "self_attn.indexer.wk", head, hidden, quantized=True),
            engine_rows.same(layer, "self_attn.indexer.weights_proj", heads, hidden, dtype="bfloat16"),
        )

    return deepseek_v3_engine.engine_table(hf, fused_shared_experts=fused_shared_experts, more_attention=indexer)


def engine_indexer(hf: HfConfig, layer: Layer) -> tuple[Row, ...]:
    """Returns the weight-table rows for the parts of an indexer that are the same in all of SGLang's models: query
    projection and key norm, which every rank stores completely."""
    head = hf["index_head_dim"]
    norm = [("self_attn.indexer.k_norm", (head,))]
    return (
        engine_rows.same(
            layer, "self_attn.indexer.wq_b", hf["index_n_heads"] * head, hf["q_lora_rank"], quantized=True
        ),
        layer.row("self_attn.indexer.k_norm.weight", norm, kind="weight", dtype="float32"),
        layer.row("self_attn.indexer.k_norm.bias", norm, kind="bias", dtype="float32"),
    )


def _attention(hf: HfConfig, layer: Layer) -> tuple[Row, ...]:
    """Returns the weight-table rows of latent attention, of the norm before it, and of the indexer, which every
    tensor-parallel rank stores completely. Norms of latents are separate modules, because the indexer reads the
    normalized query latent."""
    return *deepseek_v3.attention(hf, layer, fused=False), *_indexer(hf, with_indexers(hf, layer))


def with_indexers(hf: HfConfig, layer: Layer) -> Layer:
    """Returns the row factory `layer`, restricted to those of its layers that have an indexer. All multi-token
    prediction layers have one."""
    if layer.stage == "mtp" or all(indexers(hf)):
        return layer
    every = range(hf["num_hidden_layers"]) if layer.layers is None else layer.layers
    with_indexer = indexers(hf)
    return replace(layer, layers=tuple(index for index in every if with_indexer[index]))


def _indexer(hf: HfConfig, layer: Layer) -> tuple[Row, ...]:
    hidden = hf["hidden_size"]
    heads = hf["index_n_heads"]
    head = hf["index_head_dim"]
    prefix = "self_attention.core_attention.indexer."
    source_prefix = "self_attn.indexer."
    norm = [(f"{source_prefix}k_norm", (head,))]
    return (
        layer.linear(f"{prefix}linear_wq_b.weight", f"{source_prefix}wq_b", (heads * head, hf["q_lora_rank"])),
        layer.linear(f"{prefix}linear_wk.weight", f"{source_prefix}wk", (head, hidden)),
        layer.row(f"{prefix}k_norm.weight", norm, kind="weight", dtype="float32"),
        layer.row(f"{prefix}k_norm.bias", norm, kind="bias", dtype="float32"),
        layer.row(f"{prefix}linear_weights_proj.weight", [(f"{source_prefix}weights_proj", (heads, hidden))]),
    )
