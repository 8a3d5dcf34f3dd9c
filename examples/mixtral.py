"""A family that slimx does not bring, in one file: Mixtral (8x7B, 8x22B). `model.family: examples.mixtral` uses it.

Each function takes the content of config.json; `slimx.models.families.Family` says what it must return.
"""

from __future__ import annotations

from typing import Any

from slimx.layout.maps import Concat
from slimx.layout.table import Row, Table
from slimx.models import engine_rows
from slimx.models.decoder import decoder_fields, quantized_otherwise, scaled_otherwise, unusual
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.rows import Attention, Layer, embedding, head

ARCHITECTURE = "MixtralForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The model in megatron-core's words: what is not said here has megatron-core's default."""
    return {
        **decoder_fields(hf, Attention.of(hf)),
        "num_moe_experts": hf["num_local_experts"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,  # the weights of the chosen experts sum to one
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
    }


def unsupported(hf: dict[str, Any]) -> str | None:
    """The first thing in the configuration that this file would build wrongly: it is refused, never ignored."""
    usual = (("sliding_window", None), ("hidden_act", "silu"), ("tie_word_embeddings", False))
    return scaled_otherwise(hf, "default") or unusual(hf, *usual) or quantized_otherwise(hf)


def mtp_layers(hf: dict[str, Any]) -> int:
    """Layers of multi-token prediction: the family has none."""
    return 0


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """The trainer's place of every tensor: embedding, attention and head are the usual rows, the experts have names of
    their own."""
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
    """SGLang's place of every tensor (`sglang.srt.models.mixtral`): all experts of a layer in two tensors,
    everything else over all tensor-parallel ranks."""
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
    """Gate (w1) above up (w3), each rank a share of both; down (w2) split by columns."""
    hidden, inner = hf["hidden_size"], hf["intermediate_size"]
    w1, w2, w3 = (f"block_sparse_moe.experts.{{expert}}.w{number}" for number in (1, 2, 3))
    both = [(w1, (inner, hidden)), (w3, (inner, hidden))]
    return (
        layer.row(gate_up, both, map=Concat(), axis=0, quantized=True),
        layer.linear(down, w2, (hidden, inner), axis=1),
    )
