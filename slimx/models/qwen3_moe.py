"""Qwen3-MoE (30B-A3B, 235B-A22B and tiny ones): Hugging Face config -> Megatron config, and the weight table."""

from __future__ import annotations

from typing import Any

from slimx.errors import SlimxError
from slimx.layout.maps import Blocks, Concat, InterleaveQKV
from slimx.layout.table import Row, Table, padded_vocabulary

ARCHITECTURE = "Qwen3MoeForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define the model (no parallelism, no dtype)."""
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_moe_experts": hf["num_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        # Softmax over all experts and renormalising the kept ones equals softmax over the kept logits.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def gpt_arguments(hf: dict[str, Any]) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel besides its TransformerConfig and layer spec."""
    rope = hf.get("rope_parameters") or {}
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", hf.get("rope_theta")),
        "share_embeddings_and_output_weights": hf.get("tie_word_embeddings", False),
    }


def unsupported(hf: dict[str, Any]) -> str | None:
    """What of this checkpoint's config cannot be built yet, in words; None if all can."""
    # Of this architecture SGLang 0.5.23 builds MoE layers only: an engine could not serve such a checkpoint. No
    # published one has dense layers.
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        return "dense layers among the MoE layers (decoder_sparse_step, mlp_only_layers)"
    if hf.get("attention_bias"):
        return "attention_bias"
    if (hf.get("rope_parameters") or {}).get("rope_type", "default") != "default":
        return "rope scaling (rope_parameters.rope_type)"
    return None


def mtp_layers(hf: dict[str, Any]) -> int:
    """Layers of multi-token prediction: the family has none."""
    return 0


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """Where every checkpoint tensor lives in the Megatron model."""
    hidden, head, vocab = hf["hidden_size"], hf["head_dim"], hf["vocab_size"]
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    experts, inner = hf["num_experts"], hf["moe_intermediate_size"]
    here, there = "decoder.layers.{layer}.", "model.layers.{layer}."
    attention, moe = here + "self_attention.", here + "mlp."
    expert = there + "mlp.experts.{expert}."
    qkv = InterleaveQKV(heads, groups, head)
    tied = hf.get("tie_word_embeddings", False)
    output = Row("output_layer.weight", (("lm_head.weight", (vocab, hidden)),), axis=0, stage="last")
    rows = (
        Row(
            "embedding.word_embeddings.weight",
            (("model.embed_tokens.weight", (vocab, hidden)),),
            axis=0,
            stage="first",
            # The last stage keeps a copy to compute logits with; megatron-core sums the gradients of both.
            copies=(("last", "output_layer.weight"),) if tied else (),
        ),
        Row(attention + "linear_qkv.layer_norm_weight", ((there + "input_layernorm.weight", (hidden,)),)),
        Row(
            attention + "linear_qkv.weight",
            (
                (there + "self_attn.q_proj.weight", (heads * head, hidden)),
                (there + "self_attn.k_proj.weight", (groups * head, hidden)),
                (there + "self_attn.v_proj.weight", (groups * head, hidden)),
            ),
            qkv,
            axis=0,
            quantised=True,
        ),
        Row(attention + "q_layernorm.weight", ((there + "self_attn.q_norm.weight", (head,)),)),
        Row(attention + "k_layernorm.weight", ((there + "self_attn.k_norm.weight", (head,)),)),
        Row(
            attention + "linear_proj.weight",
            ((there + "self_attn.o_proj.weight", (hidden, heads * head)),),
            axis=1,
            quantised=True,
        ),
        Row(here + "pre_mlp_layernorm.weight", ((there + "post_attention_layernorm.weight", (hidden,)),)),
        Row(moe + "router.weight", ((there + "mlp.gate.weight", (experts, hidden)),)),
        Row(
            moe + "experts.linear_fc1.weight{expert}",
            ((expert + "gate_proj.weight", (inner, hidden)), (expert + "up_proj.weight", (inner, hidden))),
            Concat(),
            axis=0,
            quantised=True,
        ),
        Row(
            moe + "experts.linear_fc2.weight{expert}",
            ((expert + "down_proj.weight", (hidden, inner)),),
            axis=1,
            quantised=True,
        ),
        Row("decoder.final_layernorm.weight", (("model.norm.weight", (hidden,)),), stage="last"),
        *(() if tied else (output,)),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """Where SGLang 0.5.23 holds every checkpoint tensor (`sglang.srt.models.qwen3_moe`), fused as its kernels want.

    There are no shared experts to fuse. Raises SlimxError for tied embeddings."""
    if hf.get("tie_word_embeddings"):
        raise SlimxError(
            f"{ARCHITECTURE} with tie_word_embeddings: SGLang 0.5.23 builds an output layer of its own for it, and an "
            "engine would serve wrong logits; train it without engines, or untie the embeddings"
        )
    hidden, head, vocab = hf["hidden_size"], hf["head_dim"], hf["vocab_size"]
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    experts, inner = hf["num_experts"], hf["moe_intermediate_size"]
    layer = "model.layers.{layer}."
    attention, expert = layer + "self_attn.", layer + "mlp.experts.{expert}."
    rows = (
        padded_vocabulary("model.embed_tokens.weight", vocab, hidden, stage="first", group="attention"),
        Row(layer + "input_layernorm.weight", ((layer + "input_layernorm.weight", (hidden,)),)),
        Row(
            attention + "qkv_proj.weight",
            (
                (attention + "q_proj.weight", (heads * head, hidden)),
                (attention + "k_proj.weight", (groups * head, hidden)),
                (attention + "v_proj.weight", (groups * head, hidden)),
            ),
            Blocks((heads, groups, groups)),
            axis=0,
            group="attention",
            quantised=True,
        ),
        Row(attention + "q_norm.weight", ((attention + "q_norm.weight", (head,)),)),
        Row(attention + "k_norm.weight", ((attention + "k_norm.weight", (head,)),)),
        Row(
            attention + "o_proj.weight",
            ((attention + "o_proj.weight", (hidden, heads * head)),),
            axis=1,
            group="attention",
            quantised=True,
        ),
        Row(layer + "post_attention_layernorm.weight", ((layer + "post_attention_layernorm.weight", (hidden,)),)),
        Row(layer + "mlp.gate.weight", ((layer + "mlp.gate.weight", (experts, hidden)),)),
        Row(
            layer + "mlp.experts.w13_weight",
            ((expert + "gate_proj.weight", (inner, hidden)), (expert + "up_proj.weight", (inner, hidden))),
            Concat(),
            axis=0,
            quantised=True,
        ),
        Row(
            layer + "mlp.experts.w2_weight",
            ((expert + "down_proj.weight", (hidden, inner)),),
            axis=1,
            quantised=True,
        ),
        Row("model.norm.weight", (("model.norm.weight", (hidden,)),), stage="last"),
        padded_vocabulary("lm_head.weight", vocab, hidden, stage="last", group="tensor"),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=experts)
