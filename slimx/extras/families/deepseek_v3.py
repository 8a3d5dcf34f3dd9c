"""Family DeepSeek-V3 (V3, R1, Kimi-K2, Moonlight).

The models have multi-head latent attention, a sigmoid router with a selection bias and expert groups, shared experts,
dense first layers, and multi-token prediction (DeepSeek-V3 Technical Report, 2412.19437). Rotary dimensions are
interleaved pairs in the checkpoint. megatron-core's MLA deinterleaves activations, so weights are copied unchanged."""

from __future__ import annotations

from functools import partial

from slimx.extras.families.deepseek_v3_engine import draft_rows as draft_rows
from slimx.extras.families.deepseek_v3_engine import engine_table as engine_table
from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.extras.families.prediction import table_with_prediction
from slimx.extras.families.sigmoid_router import moe_fields, unsupported_router
from slimx.json_types import Json
from slimx.layout.table import Row, Table
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import quantized_otherwise, rotary, scaled_otherwise, unsupported_field
from slimx.models.fields import HfConfig
from slimx.models.rows import Layer

ARCHITECTURE = "DeepseekV3ForCausalLM"


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's MLATransformerConfig that define the model, except parallelism and
    dtype."""
    return {
        "multi_latent_attention": True,
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_attention_heads"],
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        **_rotary(hf),
        "ffn_hidden_size": hf["intermediate_size"],
        **moe_fields(hf),
        "normalization": "RMSNorm",
        # Engines use it for the latents' norms, too, where transformers always uses 1e-6.
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def _rotary(hf: HfConfig) -> Json:
    kind, scaling = rotary(hf)
    fields = {"rope_type": "rope", "rotary_base": scaling["rope_theta"]}
    if kind == "yarn":
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "beta_fast": scaling.get("beta_fast") or 32,
            "beta_slow": scaling.get("beta_slow") or 1,
            "mscale": scaling.get("mscale") or 1.0,
            "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
        }
    return fields


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    return unsupported_model(hf) or quantized_otherwise(hf)


def unsupported_model(hf: HfConfig) -> str | None:
    """Returns the same description as `unsupported`, but does not check the checkpoint's quantization."""
    return _unsupported_rotary(hf) or unsupported_router(hf) or _unsupported_rest(hf)


def _unsupported_rotary(hf: HfConfig) -> str | None:
    scaled = scaled_otherwise(hf, "default", "yarn")
    if scaled:
        return scaled
    kind, scaling = rotary(hf)
    if not hf.get("rope_interleave", True):
        return "rope_interleave false"
    if kind == "yarn":
        # megatron-core's MLA derives the attention factor from the two mscales, and rounds the bounds of YaRN's ramp.
        if scaling.get("attention_factor") is not None:
            return f"rope_scaling.attention_factor {scaling['attention_factor']}"
        if not scaling.get("truncate", True):
            return "rope_scaling.truncate false"
        mscale = scaling.get("mscale")
        mscale_all_dim = scaling.get("mscale_all_dim")
        # If only one of the two is set, transformers and DeepSeek's code interpret it differently.
        if bool(mscale) != bool(mscale_all_dim) and not (mscale == 1 and not mscale_all_dim):
            return f"rope_scaling.mscale {mscale} and mscale_all_dim {mscale_all_dim}, of which only one is set,"
    return None


def _unsupported_rest(hf: HfConfig) -> str | None:
    rotating = hf["qk_rope_head_dim"]
    only = (
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("hidden_act", "silu"),
        # Latent attention has no separate key and value heads; config.json repeats these sizes.
        ("num_key_value_heads", hf["num_attention_heads"]),
        ("head_dim", rotating),
        ("qk_head_dim", hf["qk_nope_head_dim"] + rotating),
    )
    return unsupported_field(hf, *only)


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp`: number of multi-token prediction layers to train; further layers that the checkpoint declares are
    copied unchanged to exports (`Table.frozen`)."""
    return table_with_prediction(hf, partial(attention, hf), mtp=mtp)


def attention(hf: HfConfig, layer: Layer, *, fused: bool = True) -> tuple[Row, ...]:
    """Returns the weight-table rows of latent attention and of the norm before it. Every tensor-parallel rank computes
    all latents, but only its shard of the heads. `fused`: True if each norm of a latent is in one module with the
    projection after it."""
    hidden = hf["hidden_size"]
    heads = hf["num_attention_heads"]
    query = hf["q_lora_rank"]
    latent = hf["kv_lora_rank"]
    nope = hf["qk_nope_head_dim"]
    rope = hf["qk_rope_head_dim"]
    value = hf["v_head_dim"]
    wide = heads * (nope + rope)
    norm = "self_attention.linear_{}_up_proj.layer_norm_weight" if fused else "self_attention.{}_layernorm.weight"
    queries: tuple[Row, ...]
    if query is None:
        queries = (layer.linear("self_attention.linear_q_proj.weight", "self_attn.q_proj", (wide, hidden), axis=0),)
    else:
        queries = (
            layer.linear("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj", (query, hidden)),
            layer.norm(norm.format("q"), "self_attn.q_a_layernorm", query),
            layer.linear("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj", (wide, query), axis=0),
        )
    down = (latent + rope, hidden)
    up = (heads * (nope + value), latent)
    return (
        layer.norm("input_layernorm.weight", "input_layernorm", hidden),
        *queries,
        layer.linear("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa", down),
        layer.norm(norm.format("kv"), "self_attn.kv_a_layernorm", latent),
        layer.linear("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj", up, axis=0),
        layer.linear("self_attention.linear_proj.weight", "self_attn.o_proj", (hidden, heads * value), axis=1),
    )
