"""Floating-point operations that training on a sequence takes, from the sizes of the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from slimx.models.layer_kind import LayerKind, SequenceFlops


def sequence_flops(transformer: dict[str, Any], vocab_size: int, kind: LayerKind) -> SequenceFlops:
    """Counted from fields of megatron-core's TransformerConfig (or its MLA variant).

    A product of a vector with a weight matrix takes 2 FLOPs per weight in the forward pass and twice that in the
    backward pass; attention's two products take 2 FLOPs per pair of positions and dimension of a head (Narayanan et
    al., 2104.04473, appendix; extended to GQA, MLA and MoE as in Megatron-LM's `num_floating_point_operations`). A
    token counts the experts that it is sent to, not those that exist. Norms, rotary embeddings and softmax are small,
    and layers of multi-token prediction change both terms nearly alike: they are left out.
    """
    hidden, layers = transformer["hidden_size"], kind.layers(transformer)
    mixers, mlps = Counter(layer.mixer for layer in layers), Counter(layer.mlp for layer in layers)
    weights, pairs = _attention(transformer)
    per_token = mixers["attention"] * weights + hidden * vocab_size
    per_token += mixers["recurrent"] * kind.mixer_products(transformer) if mixers["recurrent"] else 0
    per_token += mlps["dense"] * _matrices(transformer) * hidden * transformer["ffn_hidden_size"]
    per_token += mlps["experts"] * _experts(transformer) if mlps["experts"] else 0
    attention = kind.attention_flops(transformer, mixers["attention"], pairs)
    return SequenceFlops(linear=3 * 2 * per_token + attention.linear, quadratic=attention.quadratic)


def layer_products(transformer: dict[str, Any], vocab_size: int, length: int, kind: LayerKind) -> dict[str, float]:
    """FLOPs of the forward pass for each token of a sequence of `length`, all layers together, by megatron-core's names
    of recomputed modules; what belongs to none of them is under `rest`, the output layer under `head`.

    `shared_experts` is a part of `moe` and not counted there. Norms and activations have no products."""
    total = sequence_flops(transformer, vocab_size, kind)
    mlps = Counter(layer.mlp for layer in kind.layers(transformer))
    hidden, moe = transformer["hidden_size"], mlps["experts"]
    out = {"core_attn": total.quadratic * length / 3, "head": 2.0 * hidden * vocab_size, "mla_up_proj": 0.0}
    matrices = _matrices(transformer)
    out["mlp"] = 2.0 * mlps["dense"] * matrices * hidden * transformer["ffn_hidden_size"]
    shared = transformer.get("moe_shared_expert_intermediate_size") or 0
    out["shared_experts"] = 2.0 * moe * matrices * hidden * shared
    out["moe"] = 2.0 * moe * _experts(transformer) - out["shared_experts"] if moe else 0.0
    if transformer.get("multi_latent_attention"):
        heads, head = transformer["num_attention_heads"], transformer["qk_head_dim"]
        query = (transformer["q_lora_rank"] or 0) * heads * (head + transformer["qk_pos_emb_head_dim"])
        keys = transformer["kv_lora_rank"] * heads * (head + transformer["v_head_dim"])
        out["mla_up_proj"] = 2.0 * transformer["num_layers"] * (query + keys)
    forward = (total.linear + total.quadratic * length) / 3
    return out | {"rest": max(0.0, forward - sum(out.values()))}


def _matrices(transformer: dict[str, Any]) -> int:
    """Matrices of an MLP or an expert: gate, up and down, or the last two."""
    return 3 if transformer.get("gated_linear_unit", True) else 2


def _attention(transformer: dict[str, Any]) -> tuple[int, int]:
    """Sizes of one layer: weights that every token is multiplied with; dimensions of a pair's two products, all heads
    together."""
    hidden, heads = transformer["hidden_size"], transformer["num_attention_heads"]
    if not transformer.get("multi_latent_attention"):
        head, gates = transformer["kv_channels"], heads if transformer.get("attention_output_gate") else 0
        return hidden * head * (2 * heads + 2 * transformer["num_query_groups"] + gates), 2 * heads * head
    rotary, value = transformer["qk_pos_emb_head_dim"], transformer["v_head_dim"]
    key = transformer["qk_head_dim"] + rotary
    rank, query_rank = transformer["kv_lora_rank"], transformer["q_lora_rank"]
    query = hidden * query_rank + query_rank * heads * key if query_rank else hidden * heads * key
    latent = hidden * (rank + rotary) + rank * heads * (transformer["qk_head_dim"] + value)
    return query + latent + heads * value * hidden, heads * (key + value)


def _experts(transformer: dict[str, Any]) -> int:
    """Weights of one MoE layer that every token is multiplied with, router and shared experts included."""
    hidden = transformer["hidden_size"]
    chosen = transformer["moe_router_topk"] * transformer["moe_ffn_hidden_size"]
    shared = transformer.get("moe_shared_expert_intermediate_size") or 0
    gate = hidden if transformer.get("moe_shared_expert_gate") else 0
    return _matrices(transformer) * hidden * (chosen + shared) + hidden * transformer["num_moe_experts"] + gate
