"""gpt-oss (20b, 120b and tiny ones): attention with sinks, every other layer over a window only, and biases everywhere.

The experts stand in stacks, gate and up in alternating columns; published checkpoints hold them in MXFP4,
transformers writes bf16. Exports are bf16 or fp32, as transformers writes them.
Source of the model: gpt-oss-120b & gpt-oss-20b Model Card (2508.10925); transformers' modeling_gpt_oss.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slimx.layout.maps import Blocks, Deinterleave, Once
from slimx.layout.number_formats import all_formats
from slimx.layout.table import Row, Table
from slimx.models import decoder, engine_rows
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import Fields
from slimx.models.rows import Attention, Layer, embedding, head

ARCHITECTURE = "GptOssForCausalLM"
ENGINE_ARGUMENTS = {"moe_runner_backend": "triton"}
"""Fields of SGLang's ServerArgs under which `engine_table` holds. By itself SGLang takes triton_kernel where it can,
which has experts transposed with gate and up in alternating columns: no row of them is a row of the trainer's."""
NO_CPU_ENGINE = (
    "its CPU path takes this architecture with the kernels of AMX only, whose layout of weights is their own"
)
_WINDOWED = {"sliding_attention": 1, "full_attention": 0}


def transformer_config(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define the model (no parallelism, no dtype)."""
    scaling = decoder.rotary(hf)[1]
    return {
        **decoder.decoder_fields(hf, _attention(hf)),
        "add_bias_linear": True,
        # A window of n tokens in transformers holds the query's own; megatron-core counts those to its left.
        "window_size": (hf["sliding_window"] - 1, 0),
        "window_attn_skip_freq": [_WINDOWED[kind] for kind in hf["layer_types"]],
        "softmax_type": "learnable",
        "num_moe_experts": hf["num_local_experts"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        # gate * sigmoid(1.702 * gate) * (up + 1), both clamped before.
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": hf["swiglu_limit"],
        "yarn_rotary_scaling_factor": scaling["factor"],
        "yarn_original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "yarn_beta_fast": scaling.get("beta_fast", 32.0),
        "yarn_beta_slow": scaling.get("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": scaling.get("truncate", True),
    }


def gpt_arguments(hf: Fields) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel besides its TransformerConfig and layer spec."""
    return {**decoder.gpt_arguments(hf), "position_embedding_type": "yarn"}


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    if scaled := decoder.scaled_otherwise(hf, "yarn"):
        return scaled
    scaling = decoder.rotary(hf)[1]
    if given := [key for key in ("attention_factor", "mscale", "mscale_all_dim") if scaling.get(key)]:
        return f"rope_scaling.{given[0]} {scaling[given[0]]}"
    if odd := set(hf["layer_types"]) - set(_WINDOWED):
        return f"layer_types with {min(odd)}"
    if other := decoder.quantised_otherwise(hf, "mxfp4"):
        return other
    group = all_formats()["mxfp4"].GROUP
    if odd := [key for key in ("hidden_size", "intermediate_size") if hf[key] % group]:
        return f"{odd[0]} {hf[odd[0]]}, no multiple of {group}"
    only = (("tie_word_embeddings", False), ("attention_bias", True), ("hidden_act", "silu"), ("swiglu_alpha", 1.702))
    return decoder.unusual(hf, *only)


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    sizes, layer = _attention(hf), Layer()
    hidden, inner, experts = sizes.hidden, hf["intermediate_size"], hf["num_local_experts"]
    one, two = "mlp.experts.linear_fc1.", "mlp.experts.linear_fc2."
    rows = (
        embedding(hf),
        *layer.attention(sizes),
        layer.row(
            "self_attention.core_attention.softmax_offset", [("self_attn", (sizes.heads,))], kind="sinks", axis=0
        ),
        layer.norm("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden),
        *_router(layer, hidden, experts),
        _expert(
            layer, one + "weight{expert}", "gate_up_proj[{expert}].T", 2 * inner, hidden, map=Deinterleave(), axis=0
        ),
        _expert(layer, one + "bias{expert}", "gate_up_proj_bias[{expert}]", 2 * inner, map=Deinterleave(), axis=0),
        _expert(layer, two + "weight{expert}", "down_proj[{expert}].T", hidden, inner, axis=1),
        _expert(layer, two + "bias{expert}", "down_proj_bias[{expert}]", hidden),
        *head(hf),
    )
    return _table(hf, rows)


def engine_table(hf: Fields, *, fused_shared_experts: bool = False) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor (`sglang.srt.models.gpt_oss`) with the experts' kernel `triton`
    and an attention backend other than trtllm_mha, whose sinks are fp32. There are no shared experts to fuse."""
    sizes, layer = _attention(hf), engine_rows.layer()
    hidden, inner, experts = sizes.hidden, hf["intermediate_size"], hf["num_local_experts"]
    pairs, at = Blocks((inner,)), "mlp.experts."  # gate and up stay neighbours
    rows = (
        engine_rows.embedding(hf),
        *engine_rows.attention(layer, sizes),
        layer.row(
            "self_attn.sinks",
            [("self_attn", (sizes.heads,))],
            kind="sinks",
            axis=0,
            group="attention",
            dtype="bfloat16",
        ),
        *_router(layer, hidden, experts),
        _expert(layer, at + "w13_weight", "gate_up_proj[{expert}].T", 2 * inner, hidden, map=pairs, axis=0),
        _expert(
            layer, at + "w13_weight_bias", "gate_up_proj_bias[{expert}]", 2 * inner, map=pairs, axis=0, dtype="float32"
        ),
        _expert(layer, at + "w2_weight", "down_proj[{expert}].T", hidden, inner, axis=1),
        # Every rank of an expert adds its own to a sum over them.
        _expert(layer, at + "w2_weight_bias", "down_proj_bias[{expert}]", hidden, map=Once(), dtype="float32"),
        *engine_rows.head(hf),
    )
    return _table(hf, rows)


def _table(hf: Fields, rows: tuple[Row, ...]) -> Table:
    # No checkpoint of the family is in fp8 blocks.
    plain = tuple(replace(row, quantised=False) for row in rows)
    return Table(plain, layers=hf["num_hidden_layers"], experts=hf["num_local_experts"])


def _attention(hf: Fields) -> Attention:
    return Attention.of(hf, qkv_bias=True, output_bias=True)


def _router(layer: Layer, hidden: int, experts: int) -> tuple[Row, Row]:
    shapes = {"weight": (experts, hidden), "bias": (experts,)}
    weight, bias = (layer.row(f"mlp.router.{kind}", [("mlp.router", shapes[kind])], kind=kind) for kind in shapes)
    return weight, bias


def _expert(layer: Layer, name: str, source: str, *shape: int, **how: Any) -> Row:
    return layer.row(name, [("mlp.experts", shape)], kind=source, **how)
