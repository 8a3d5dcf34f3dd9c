"""Model family that slimx does not include, in one file: Mixtral (8x7B, 8x22B), for `model.family: examples.mixtral`.

Each function takes the content of config.json; `slimx.models.families.Family` describes what it must return.
"""

from __future__ import annotations

from typing import Any

from slimx.layout.maps import Concat
from slimx.layout.table import Row, Table
from slimx.models import engine_rows
from slimx.models.decoder import decoder_fields, quantized_otherwise, scaled_otherwise, unsupported_field
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.rows import Attention, Layer, embedding, head

ARCHITECTURE = "MixtralForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns fields of megatron-core's TransformerConfig; other fields have megatron-core's defaults."""
    return {
        **decoder_fields(hf, Attention.of(hf)),
        "num_moe_experts": hf["num_local_experts"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,  # the weights of the selected experts sum to 1
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
    }


def unsupported(hf: dict[str, Any]) -> str | None:
    """Returns the first setting in config.json that this file does not support, so that slimx refuses it; else None."""
    usual = (("sliding_window", None), ("hidden_act", "silu"), ("tie_word_embeddings", False))
    return scaled_otherwise(hf, "default") or unsupported_field(hf, *usual) or quantized_otherwise(hf)


def mtp_layers(hf: dict[str, Any]) -> int:
    """Returns the number of multi-token prediction layers; this family has none."""
    return 0


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """Returns the table that maps the checkpoint's tensors to the trainer's. Embedding, attention and head have the
    usual rows; the experts have names of their own."""
    hidden, experts, layer = hf["hidden_size"], hf["num_local_experts"], Layer()
    at = "mlp.experts."
    rows = (
        embedding(hf),
        *layer.attention(Attention.of(hf)),
        layer.norm("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden),
        layer.row("mlp.router.weight", [("block_sparse_moe.gate", (experts, hidden))]),
        *_experts(hf, layer, at + "linear_fc1.weight{expert}", at + "linear_fc2.weight{expert}"),
        *head(hf),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps the checkpoint's tensors to SGLang's (`sglang.srt.models.mixtral`). The experts of a
    layer are in two tensors; all other tensors are split over the tensor-parallel ranks."""
    hidden, experts, layer = hf["hidden_size"], hf["num_local_experts"], engine_rows.layer()
    at = "block_sparse_moe.experts."
    rows = (
        engine_rows.embedding(hf, "tensor"),
        *engine_rows.attention(layer, Attention.of(hf), "tensor"),
        engine_rows.same(layer, "block_sparse_moe.gate", experts, hidden),
        *_experts(hf, layer, at + "w13_weight", at + "w2_weight"),
        *engine_rows.head(hf),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)


def _experts(hf: dict[str, Any], layer: Layer, gate_up: str, down: str) -> tuple[Row, Row]:
    """Returns the rows of an expert: gate (w1) and up (w3) concatenated, with a part of both on each rank, and down
    (w2) split by columns. `gate_up` and `down`: names of the two tensors."""
    hidden, inner = hf["hidden_size"], hf["intermediate_size"]
    w1, w2, w3 = (f"block_sparse_moe.experts.{{expert}}.w{number}" for number in (1, 2, 3))
    both = [(w1, (inner, hidden)), (w3, (inner, hidden))]
    return (
        layer.row(gate_up, both, map=Concat(), axis=0, quantized=True),
        layer.linear(down, w2, (hidden, inner), axis=1),
    )
