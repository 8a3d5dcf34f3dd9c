"""Family Qwen3-MoE (30B-A3B, 235B-A22B and tiny models): every layer has grouped-query attention with a norm per query
and key head, and experts."""

from __future__ import annotations

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.table import Table
from slimx.models import engine_rows
from slimx.models.decoder import decoder_fields, quantized_otherwise, scaled_otherwise, unsupported_field
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention, Layer, embedding, head, tied_copies

ARCHITECTURE = "Qwen3MoeForCausalLM"


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return {
        **decoder_fields(hf, _attention(hf)),
        "num_moe_experts": _experts(hf),
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        # Softmax over all experts followed by renormalizing the selected ones equals softmax over the selected logits.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
    }


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    # SGLang 0.5.23 builds only MoE layers for this architecture and could not serve a checkpoint with dense ones. No
    # published checkpoint has any.
    if hf.get("mlp_only_layers"):
        return f"mlp_only_layers {hf['mlp_only_layers']} (dense layers among the MoE layers)"
    if hf.get("decoder_sparse_step", 1) != 1:
        return f"decoder_sparse_step {hf['decoder_sparse_step']} (dense layers among the MoE layers)"
    usual = (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu"))
    return scaled_otherwise(hf, "default") or unsupported_field(hf, *usual) or quantized_otherwise(hf)


def _attention(hf: HfConfig) -> Attention:
    return Attention.of(hf, qk_norm=True)


def _experts(hf: HfConfig) -> int:
    """Returns the number of experts in config.json `hf`: num_experts in published checkpoints, num_local_experts in
    those that current transformers writes."""
    if "num_local_experts" in hf and "num_experts" not in hf:
        return hf["num_local_experts"]
    return hf["num_experts"]


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because the family has no multi-token prediction layers."""
    hidden = hf["hidden_size"]
    inner = hf["moe_intermediate_size"]
    experts = _experts(hf)
    layer = Layer()
    rows = (embedding(hf), *layer.attention(_attention(hf)), *layer.moe(hidden, inner, experts), *head(hf))
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts, aliases=tied_copies(hf))


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.qwen3_moe`), with tensors fused as its kernels require.

    `fused_shared_experts` is ignored, because the family has no shared experts. Raises SlimxError for tied
    embeddings."""
    if hf.get("tie_word_embeddings"):
        raise SlimxError(
            f"{ARCHITECTURE} with tie_word_embeddings cannot be served, because SGLang 0.5.23 builds a separate "
            "output layer for such a model and would return wrong logits; train the model without engines "
            "(algorithm.name=sft), or untie the embeddings",
            code="model.served_field",
            about="tie_word_embeddings",
        )
    experts = _experts(hf)
    layer = engine_rows.layer()
    rows = (
        engine_rows.embedding(hf),
        *engine_rows.attention(layer, _attention(hf)),
        *engine_rows.moe(layer, hf["hidden_size"], hf["moe_intermediate_size"], experts),
        *engine_rows.head(hf),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)
