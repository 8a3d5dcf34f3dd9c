"""Family gpt-oss (20b, 120b and tiny models): attention with sinks, a sliding window in every other layer, and biases
in all linear layers.

Checkpoints stack all experts in one tensor, with gate and up in alternating columns. Published checkpoints store them
in MXFP4, and transformers writes bf16. Exports are bf16 or fp32, in transformers' layout. Sources: gpt-oss-120b &
gpt-oss-20b Model Card (arXiv:2508.10925), and transformers' modeling_gpt_oss.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from slimx.json_types import Json
from slimx.layout.maps import Blocks, Deinterleave, Once
from slimx.layout.number_formats import all_formats
from slimx.layout.table import Row, Table
from slimx.models import decoder, engine_rows
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention, Layer, RowOptions, embedding, head

ARCHITECTURE = "GptOssForCausalLM"
ENGINE_ARGUMENTS = {"moe_runner_backend": "triton"}
"""Fields of SGLang's ServerArgs -> the value that `engine_table` requires. SGLang's default is triton_kernel where
available. That kernel stores experts transposed, with gate and up in alternating columns, so no row of theirs equals a
row of a trainer parameter."""
NO_CPU_ENGINE = "it would need its AMX kernels for this architecture, which use a different weight layout"
_WINDOWED = {"sliding_attention": 1, "full_attention": 0}


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    scaling = decoder.rotary(hf)[1]
    return {
        **decoder.decoder_fields(hf, _attention(hf)),
        "add_bias_linear": True,
        # transformers' window of n tokens includes the query's own token; megatron-core counts only the tokens to its
        # left.
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
        # gate * sigmoid(1.702 * gate) * (up + 1), where gate and up are clamped first.
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": hf["swiglu_limit"],
        "yarn_rotary_scaling_factor": scaling["factor"],
        "yarn_original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "yarn_beta_fast": scaling.get("beta_fast", 32.0),
        "yarn_beta_slow": scaling.get("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": scaling.get("truncate", True),
    }


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return {**decoder.gpt_arguments(hf), "position_embedding_type": "yarn"}


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    scaled = decoder.scaled_otherwise(hf, "yarn")
    if scaled:
        return scaled
    scaling = decoder.rotary(hf)[1]
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if scaling.get(key):
            return f"rope_scaling.{key} {scaling[key]}"
    unknown = set(hf["layer_types"]) - set(_WINDOWED)
    if unknown:
        return f"layer_types with {min(unknown)}"
    quantized = decoder.quantized_otherwise(hf, "mxfp4")
    if quantized:
        return quantized
    group = all_formats()["mxfp4"].GROUP
    for key in ("hidden_size", "intermediate_size"):
        if hf[key] % group:
            return f"{key} {hf[key]}, not a multiple of {group}"
    only = (("tie_word_embeddings", False), ("attention_bias", True), ("hidden_act", "silu"), ("swiglu_alpha", 1.702))
    return decoder.unsupported_field(hf, *only)


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because the family has no multi-token prediction layers."""
    sizes = _attention(hf)
    layer = Layer()
    hidden = sizes.hidden
    inner = hf["intermediate_size"]
    fc1 = "mlp.experts.linear_fc1."
    fc2 = "mlp.experts.linear_fc2."
    rows = (
        embedding(hf),
        *layer.attention(sizes),
        layer.row(
            "self_attention.core_attention.softmax_offset", [("self_attn", (sizes.heads,))], kind="sinks", axis=0
        ),
        layer.norm("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden),
        *_router(layer, hidden, hf["num_local_experts"]),
        _expert(
            layer, fc1 + "weight{expert}", "gate_up_proj[{expert}].T", 2 * inner, hidden, map=Deinterleave(), axis=0
        ),
        _expert(layer, fc1 + "bias{expert}", "gate_up_proj_bias[{expert}]", 2 * inner, map=Deinterleave(), axis=0),
        _expert(layer, fc2 + "weight{expert}", "down_proj[{expert}].T", hidden, inner, axis=1),
        _expert(layer, fc2 + "bias{expert}", "down_proj_bias[{expert}]", hidden),
        *head(hf),
    )
    return _table(hf, rows)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.gpt_oss`) with the expert kernel `triton`. The attention backend must not be trtllm_mha, whose
    sinks are fp32. `fused_shared_experts` is ignored, because the family has no shared experts.
    """
    sizes = _attention(hf)
    layer = engine_rows.layer()
    hidden = sizes.hidden
    inner = hf["intermediate_size"]
    pairs = Blocks((inner,))  # keeps each gate row next to its up row
    module = "mlp.experts."
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
        *_router(layer, hidden, hf["num_local_experts"]),
        _expert(layer, module + "w13_weight", "gate_up_proj[{expert}].T", 2 * inner, hidden, map=pairs, axis=0),
        _expert(
            layer,
            module + "w13_weight_bias",
            "gate_up_proj_bias[{expert}]",
            2 * inner,
            map=pairs,
            axis=0,
            dtype="float32",
        ),
        _expert(layer, module + "w2_weight", "down_proj[{expert}].T", hidden, inner, axis=1),
        # SGLang sums this bias over the ranks that share an expert.
        _expert(layer, module + "w2_weight_bias", "down_proj_bias[{expert}]", hidden, map=Once(), dtype="float32"),
        *engine_rows.head(hf),
    )
    return _table(hf, rows)


def _table(hf: HfConfig, rows: tuple[Row, ...]) -> Table:
    # No checkpoint of this family is in block fp8.
    plain = tuple(replace(row, quantized=False) for row in rows)
    return Table(plain, layers=hf["num_hidden_layers"], experts=hf["num_local_experts"])


def _attention(hf: HfConfig) -> Attention:
    return Attention.of(hf, qkv_bias=True, output_bias=True)


def _router(layer: Layer, hidden: int, experts: int) -> tuple[Row, Row]:
    weight = layer.row("mlp.router.weight", [("mlp.router", (experts, hidden))])
    bias = layer.row("mlp.router.bias", [("mlp.router", (experts,))], kind="bias")
    return weight, bias


def _expert(layer: Layer, name: str, source: str, *shape: int, **options: Unpack[RowOptions]) -> Row:
    return layer.row(name, [("mlp.experts", shape)], kind=source, **options)
