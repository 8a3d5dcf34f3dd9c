"""The DeepSeek-V3 family (V3, R1, Kimi-K2, Moonlight): Hugging Face config -> Megatron config, and the weight table.

Multi-head latent attention, a sigmoid router with a selection bias and expert groups, shared experts, dense first
layers, multi-token prediction (DeepSeek-V3 Technical Report, 2412.19437). Rotary dimensions stand in pairs in the
checkpoint, and Megatron's MLA takes them apart in its activations: weights are copied as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from slimx.extras.families.deepseek_v3_engine import draft_rows as draft_rows
from slimx.extras.families.deepseek_v3_engine import engine_table as engine_table
from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.extras.families.prediction import table_with_prediction
from slimx.extras.families.sigmoid_router import moe_fields, unsupported_router
from slimx.layout.table import Row, Table
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import quantised_otherwise, rotary, scaled_otherwise, unusual
from slimx.models.fields import Fields
from slimx.models.rows import Layer

ARCHITECTURE = "DeepseekV3ForCausalLM"


def transformer_config(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's MLATransformerConfig that define the model (no parallelism, no dtype)."""
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
        # Also of the latents' norms, as engines have it; transformers fixes 1e-6 there.
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def _rotary(hf: Fields) -> dict[str, Any]:
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


def gpt_arguments(hf: Fields) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel besides its TransformerConfig and layer spec."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    return unsupported_model(hf) or quantised_otherwise(hf)


def unsupported_model(hf: Fields) -> str | None:
    """The same whatever the checkpoint is stored in."""
    return _unsupported_rotary(hf) or unsupported_router(hf) or _unsupported_rest(hf)


def _unsupported_rotary(hf: Fields) -> str | None:
    if scaled := scaled_otherwise(hf, "default", "yarn"):
        return scaled
    kind, scaling = rotary(hf)
    if not hf.get("rope_interleave", True):
        return "rope_interleave false"
    if kind == "yarn":
        # Megatron's MLA derives the factor from the two mscales and rounds the ramp's bounds.
        if scaling.get("attention_factor") is not None:
            return f"rope_scaling.attention_factor {scaling['attention_factor']}"
        if not scaling.get("truncate", True):
            return "rope_scaling.truncate false"
        mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        # Where one of the two is missing, transformers and DeepSeek's own code disagree on what the other one means.
        if bool(mscale) != bool(of_all) and not (mscale == 1 and not of_all):
            return f"rope_scaling.mscale {mscale} and mscale_all_dim {of_all}, of which one is missing"
    return None


def _unsupported_rest(hf: Fields) -> str | None:
    rotating = hf["qk_rope_head_dim"]
    only = (
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("hidden_act", "silu"),
        # Latent attention has no heads of key and value of its own; files repeat these sizes.
        ("num_key_value_heads", hf["num_attention_heads"]),
        ("head_dim", rotating),
        ("qk_head_dim", hf["qk_nope_head_dim"] + rotating),
    )
    return unusual(hf, *only)


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor, for a model with `mtp` layers of multi-token prediction.

    Layers of multi-token prediction that the checkpoint has beyond are the table's `frozen` tensors."""
    return table_with_prediction(hf, partial(attention, hf), mtp=mtp)


def attention(hf: Fields, at: Layer, *, fused: bool = True) -> tuple[Row, ...]:
    """Rows of latent attention with the norm before it. Every tensor-parallel rank makes the whole latents and its own
    heads of them. `fused`: the norms of the latents are one module with the products behind them."""
    hidden, heads, query, latent = (
        hf[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    wide = heads * (nope + rope)
    norm = "self_attention.linear_{}_up_proj.layer_norm_weight" if fused else "self_attention.{}_layernorm.weight"
    if query is None:
        queries = (at.linear("self_attention.linear_q_proj.weight", "self_attn.q_proj", (wide, hidden), axis=0),)
    else:
        queries = (
            at.linear("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj", (query, hidden)),
            at.norm(norm.format("q"), "self_attn.q_a_layernorm", query),
            at.linear("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj", (wide, query), axis=0),
        )
    both = (heads * (nope + value), latent)
    return (
        at.norm("input_layernorm.weight", "input_layernorm", hidden),
        *queries,
        at.linear("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa", (latent + rope, hidden)),
        at.norm(norm.format("kv"), "self_attn.kv_a_layernorm", latent),
        at.linear("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj", both, axis=0),
        at.linear("self_attention.linear_proj.weight", "self_attn.o_proj", (hidden, heads * value), axis=1),
    )
