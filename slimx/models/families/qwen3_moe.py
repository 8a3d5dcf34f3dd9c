"""Qwen3-MoE (30B-A3B, 235B-A22B and tiny ones): attention with normed heads, and experts in every layer."""

from __future__ import annotations

from typing import Any

from slimx.errors import SlimxError
from slimx.layout.table import Table
from slimx.models import engine_rows
from slimx.models.decoder import decoder_fields, first_of, quantised_otherwise, scaled_otherwise, unusual
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.rows import Attention, Layer, embedding, head, tied_copies

ARCHITECTURE = "Qwen3MoeForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define the model (no parallelism, no dtype)."""
    return {
        **decoder_fields(hf, _attention(hf)),
        "num_moe_experts": _experts(hf),
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        # Softmax over all experts and renormalising the kept ones equals softmax over the kept logits.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
    }


def unsupported(hf: dict[str, Any]) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    # Of this architecture SGLang 0.5.23 builds MoE layers only: an engine could not serve such a checkpoint. No
    # published one has dense layers.
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        key = "mlp_only_layers" if hf.get("mlp_only_layers") else "decoder_sparse_step"
        return f"{key} {hf[key]} (dense layers among the MoE layers)"
    usual = (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu"))
    return scaled_otherwise(hf, "default") or unusual(hf, *usual) or quantised_otherwise(hf)


def _attention(hf: dict[str, Any]) -> Attention:
    return Attention.of(hf, qk_norm=True)


def _experts(hf: dict[str, Any]) -> int:
    return first_of(hf, "num_experts", "num_local_experts")


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    hidden, inner, experts = hf["hidden_size"], hf["moe_intermediate_size"], _experts(hf)
    layer = Layer()
    rows = (embedding(hf), *layer.attention(_attention(hf)), *layer.moe(hidden, inner, experts), *head(hf))
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts, aliases=tied_copies(hf))


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor (`sglang.srt.models.qwen3_moe`), fused as its kernels want.

    There are no shared experts to fuse. Raises SlimxError for tied embeddings."""
    if hf.get("tie_word_embeddings"):
        raise SlimxError(
            f"{ARCHITECTURE} with tie_word_embeddings: SGLang 0.5.23 builds an output layer of its own for it, and an "
            "engine would serve wrong logits; train it without engines, or untie the embeddings",
            code="model.served_field",
            about="tie_word_embeddings",
        )
    hidden, experts, layer = hf["hidden_size"], _experts(hf), engine_rows.layer()
    rows = (
        engine_rows.embedding(hf),
        *engine_rows.attention(layer, _attention(hf)),
        *engine_rows.moe(layer, hidden, hf["moe_intermediate_size"], experts),
        *engine_rows.head(hf),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)
