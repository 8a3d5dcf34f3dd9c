"""The DeepSeek-V3 family (V3, R1, Kimi-K2, Moonlight): Hugging Face config -> Megatron config, and the weight table.

Multi-head latent attention, a sigmoid router with a selection bias and expert groups, shared experts, dense first
layers, multi-token prediction (DeepSeek-V3 Technical Report, 2412.19437). Rotary dimensions stand in pairs in the
checkpoint, and Megatron's MLA takes them apart in its activations: weights are copied as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slimx.layout.maps import Concat
from slimx.layout.table import Row, Stage, Table
from slimx.models.deepseek_v3_engine import engine_table as engine_table

ARCHITECTURE = "DeepseekV3ForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of megatron-core's MLATransformerConfig that define the model (no parallelism, no dtype)."""
    layers, dense, experts = hf["num_hidden_layers"], hf["first_k_dense_replace"], hf["n_routed_experts"]
    shared = hf.get("n_shared_experts") or 0
    return {
        "multi_latent_attention": True,
        "num_layers": layers,
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
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared * hf["moe_intermediate_size"] or None,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_num_groups": hf["n_group"] if _grouped(hf) else None,
        "moe_router_group_topk": hf["topk_group"] if _grouped(hf) else None,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "normalization": "RMSNorm",
        # Also of the latents' norms, as engines have it; transformers fixes 1e-6 there.
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def _rotary(hf: dict[str, Any]) -> dict[str, Any]:
    kind, scaling = _scaling(hf)
    fields = {"rope_type": "rope", "rotary_base": scaling.get("rope_theta", hf.get("rope_theta"))}
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


def _scaling(hf: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Type and fields of the rotary scaling, in transformers' present form or the checkpoints' older one."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return scaling.get("rope_type") or scaling.get("type") or "default", scaling


def _grouped(hf: dict[str, Any]) -> bool:
    """Whether the choice of groups excludes any expert."""
    return (hf.get("n_group") or 1) > (hf.get("topk_group") or 1)


def gpt_arguments(hf: dict[str, Any]) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel besides its TransformerConfig and layer spec."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }


def unsupported(hf: dict[str, Any]) -> str | None:
    """What of this checkpoint's config cannot be built, in words; None if all can."""
    return _unsupported_rotary(hf) or _unsupported_router(hf) or _unsupported_rest(hf)


def _unsupported_rotary(hf: dict[str, Any]) -> str | None:
    kind, scaling = _scaling(hf)
    if kind not in ("default", "yarn"):
        return f"rotary scaling of type {kind}"
    if not hf.get("rope_interleave", True):
        return "rope_interleave false"
    if kind == "yarn":
        # Megatron's MLA derives the factor from the two mscales and rounds the ramp's bounds.
        if scaling.get("attention_factor") is not None:
            return "a yarn attention_factor"
        if not scaling.get("truncate", True):
            return "yarn truncate false"
        mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        # Where one of the two is missing, transformers and DeepSeek's own code disagree on what the other one means.
        if bool(mscale) != bool(of_all) and not (mscale == 1 and not of_all):
            return f"yarn mscale {mscale} and mscale_all_dim {of_all}, of which one is missing"
    return None


def _unsupported_router(hf: dict[str, Any]) -> str | None:
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if hf.get(key, only) != only:
            return f"{key} {hf[key]}"
    chosen = hf["num_experts_per_tok"]
    # Megatron normalises the weights of the chosen experts if there are several.
    if hf.get("norm_topk_prob", True) != (chosen > 1):
        return f"norm_topk_prob {str(hf.get('norm_topk_prob', True)).lower()} and num_experts_per_tok {chosen}"
    # The checkpoint's router rates a group by its best two experts, Megatron's by its best topk // group_topk.
    if _grouped(hf) and chosen // hf["topk_group"] != 2:
        return f"num_experts_per_tok {chosen} in topk_group {hf['topk_group']} groups, which is not two of each,"
    return None


def _unsupported_rest(hf: dict[str, Any]) -> str | None:
    if hf.get("attention_bias"):
        return "attention_bias"
    if hf.get("tie_word_embeddings"):
        return "tie_word_embeddings"
    if hf.get("hidden_act", "silu") != "silu":
        return f"hidden_act {hf['hidden_act']}"
    method = (hf.get("quantization_config") or {}).get("quant_method", "fp8")
    return f"quantization_config.quant_method {method}" if method != "fp8" else None


def mtp_layers(hf: dict[str, Any]) -> int:
    """Layers of multi-token prediction that the checkpoint declares."""
    return hf.get("num_nextn_predict_layers") or 0


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """Where every checkpoint tensor lives in the Megatron model that has `mtp` layers of multi-token prediction.

    Those that the checkpoint has beyond are the table's `frozen` tensors, as are the constants that Kimi-K2 and
    Moonlight store with every layer."""
    hidden, vocab, layers = hf["hidden_size"], hf["vocab_size"], hf["num_hidden_layers"]
    experts, dense, declared = hf["n_routed_experts"], hf["first_k_dense_replace"], mtp_layers(hf)
    here, there = "decoder.layers.{layer}.", "model.layers.{layer}."
    predicting = _mtp(hf, _Layer("mtp.layers.{layer}.", there, stage="mtp"))
    unbuilt = Table(predicting, layers=layers + mtp, experts=experts, mtp_layers=declared - mtp)
    rows = (
        Row(
            "embedding.word_embeddings.weight",
            (("model.embed_tokens.weight", (vocab, hidden)),),
            axis=0,
            stage="first",
            copies=(("last", "embedding.word_embeddings.weight"),) if mtp else (),
        ),
        *_attention(hf, _Layer(here, there)),
        *_dense(hf, _Layer(here, there, layers=range(dense))),
        *_moe(hf, _Layer(here, there, layers=range(dense, layers))),
        Row("decoder.final_layernorm.weight", (("model.norm.weight", (hidden,)),), stage="last"),
        Row("output_layer.weight", (("lm_head.weight", (vocab, hidden)),), axis=0, stage="last"),
        *(predicting if mtp else ()),
    )
    frozen = unbuilt.checkpoint()
    for layer in range(layers):
        frozen[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = (hf["qk_rope_head_dim"] // 2,)
    aliases = {}
    for layer in range(layers, layers + declared):
        aliases[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        aliases[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return Table(rows, layers=layers, experts=experts, mtp_layers=mtp, aliases=aliases, frozen=frozen)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Writes rows of one kind of layer: prefixes of its names, and where it stands."""

    megatron: str
    hf: str
    stage: Stage = "layer"
    layers: range | None = None

    def row(self, name: str, sources: Iterable[tuple[str, tuple[int, ...]]], **how: Any) -> Row:
        """`name` and the sources' names without prefix and `.weight`."""
        full = tuple((f"{self.hf}{source}.weight", shape) for source, shape in sources)
        return Row(self.megatron + name, full, stage=self.stage, layers=self.layers, **how)

    def norm(self, name: str, source: str, size: int) -> Row:
        return self.row(name, [(source, (size,))])

    def linear(self, name: str, source: str, shape: tuple[int, int], axis: int | None = None) -> Row:
        return self.row(name, [(source, shape)], axis=axis, quantised=True)

    def swiglu(self, name: str, source: str, hidden: int, inner: int, suffix: str = "") -> tuple[Row, Row]:
        """Gate and up in one tensor, and down."""
        gate, up, down = (f"{source}.{kind}_proj" for kind in ("gate", "up", "down"))
        both = [(gate, (inner, hidden)), (up, (inner, hidden))]
        return (
            self.row(f"{name}.linear_fc1.weight{suffix}", both, map=Concat(), axis=0, quantised=True),
            self.linear(f"{name}.linear_fc2.weight{suffix}", down, (hidden, inner), axis=1),
        )


def _attention(hf: dict[str, Any], at: _Layer) -> tuple[Row, ...]:
    """Every tensor-parallel rank makes the whole latents and its own heads of them."""
    hidden, heads, query, latent = (
        hf[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    wide = heads * (nope + rope)
    if query is None:
        queries = (at.linear("self_attention.linear_q_proj.weight", "self_attn.q_proj", (wide, hidden), axis=0),)
    else:
        queries = (
            at.linear("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj", (query, hidden)),
            at.norm("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm", query),
            at.linear("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj", (wide, query), axis=0),
        )
    both = (heads * (nope + value), latent)
    return (
        at.norm("input_layernorm.weight", "input_layernorm", hidden),
        *queries,
        at.linear("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa", (latent + rope, hidden)),
        at.norm("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm", latent),
        at.linear("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj", both, axis=0),
        at.linear("self_attention.linear_proj.weight", "self_attn.o_proj", (hidden, heads * value), axis=1),
    )


def _dense(hf: dict[str, Any], at: _Layer) -> tuple[Row, ...]:
    if not at.layers:
        return ()
    hidden = hf["hidden_size"]
    return (
        at.norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", hidden),
        *at.swiglu("mlp", "mlp", hidden, hf["intermediate_size"]),
    )


def _moe(hf: dict[str, Any], at: _Layer) -> tuple[Row, ...]:
    hidden, inner, experts = hf["hidden_size"], hf["moe_intermediate_size"], hf["n_routed_experts"]
    bias = (at.hf + "mlp.gate.e_score_correction_bias", (experts,))
    shared = hf.get("n_shared_experts") or 0
    return (
        at.norm("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden),
        at.row("mlp.router.weight", [("mlp.gate", (experts, hidden))]),
        Row(at.megatron + "mlp.router.expert_bias", (bias,), stage=at.stage, layers=at.layers, dtype="float32"),
        *(at.swiglu("mlp.shared_experts", "mlp.shared_experts", hidden, shared * inner) if shared else ()),
        *at.swiglu("mlp.experts", "mlp.experts.{expert}", hidden, inner, suffix="{expert}"),
    )


def _mtp(hf: dict[str, Any], at: _Layer) -> tuple[Row, ...]:
    """A layer of multi-token prediction: projection of (embedding, hidden state), a MoE layer, a norm. Embedding and
    output head are the model's."""
    hidden = hf["hidden_size"]
    inside = _Layer(at.megatron + "transformer_layer.", at.hf, stage=at.stage)
    return (
        at.norm("enorm.weight", "enorm", hidden),
        at.norm("hnorm.weight", "hnorm", hidden),
        at.row("eh_proj.weight", [("eh_proj", (hidden, 2 * hidden))], axis=0),
        *_attention(hf, inside),
        *_moe(hf, inside),
        at.norm("final_layernorm.weight", "shared_head.norm", hidden),
    )
