"""Computes the floating-point operations of training on one sequence from the model's sizes."""

from __future__ import annotations

from collections import Counter

from slimx.models.layer_kind import LayerKind, ModelFields, SequenceFlops


def sequence_flops(transformer: ModelFields, vocab_size: int, kind: LayerKind) -> SequenceFlops:
    """Returns the FLOPs of the forward and backward pass on one sequence. `transformer`: fields of megatron-core's
    TransformerConfig or MLATransformerConfig; `kind`: kind of the decoder's layers.

    Multiplying a vector by a weight matrix takes 2 FLOPs per weight in the forward pass and 4 in the backward pass.
    Each of attention's two matrix products takes 2 FLOPs per pair of positions and per dimension of a head in the
    forward pass (Narayanan et al., 2104.04473, appendix; extended to GQA, MLA and MoE as in Megatron-LM's
    `num_floating_point_operations`). Only the experts to which a token is routed are counted. Norms, rotary embeddings
    and softmax are omitted because they are negligible, and multi-token prediction layers because they change the
    linear and the quadratic term by nearly the same factor."""
    hidden = transformer["hidden_size"]
    layers = kind.layers(transformer)
    mixers = Counter(layer.mixer for layer in layers)
    mlps = Counter(layer.mlp for layer in layers)
    weights, pairs = _attention(transformer)
    per_token = mixers["attention"] * weights + hidden * vocab_size
    if mixers["recurrent"]:
        per_token += mixers["recurrent"] * kind.mixer_products(transformer)
    per_token += mlps["dense"] * _matrices(transformer) * hidden * transformer["ffn_hidden_size"]
    if mlps["experts"]:
        per_token += mlps["experts"] * _experts(transformer)
    attention = kind.attention_flops(transformer, mixers["attention"], pairs)
    return SequenceFlops(linear=3 * 2 * per_token + attention.linear, quadratic=attention.quadratic)


def layer_products(transformer: ModelFields, vocab_size: int, length: int, kind: LayerKind) -> dict[str, float]:
    """Returns the forward FLOPs per token of a sequence of `length` tokens, summed over layers, by the module names in
    megatron-core's `recompute_modules`. Key `head` stands for the output layer, `rest` for everything else.

    Key `moe` excludes `shared_experts`. Norms and activations are not counted."""
    total = sequence_flops(transformer, vocab_size, kind)
    mlps = Counter(layer.mlp for layer in kind.layers(transformer))
    hidden = transformer["hidden_size"]
    moe = mlps["experts"]
    out = {"core_attn": total.quadratic * length / 3, "head": 2.0 * hidden * vocab_size, "mla_up_proj": 0.0}
    matrices = _matrices(transformer)
    out["mlp"] = 2.0 * mlps["dense"] * matrices * hidden * transformer["ffn_hidden_size"]
    shared = transformer.get("moe_shared_expert_intermediate_size") or 0
    out["shared_experts"] = 2.0 * moe * matrices * hidden * shared
    out["moe"] = 2.0 * moe * _experts(transformer) - out["shared_experts"] if moe else 0.0
    if transformer.get("multi_latent_attention"):
        heads = transformer["num_attention_heads"]
        head = transformer["qk_head_dim"]
        query = (transformer["q_lora_rank"] or 0) * heads * (head + transformer["qk_pos_emb_head_dim"])
        keys = transformer["kv_lora_rank"] * heads * (head + transformer["v_head_dim"])
        out["mla_up_proj"] = 2.0 * transformer["num_layers"] * (query + keys)
    forward = (total.linear + total.quadratic * length) / 3
    return out | {"rest": max(0.0, forward - sum(out.values()))}


def _matrices(transformer: ModelFields) -> int:
    """Returns the number of weight matrices in an MLP or an expert: 3 if it is gated (gate, up, down), otherwise 2 (up,
    down)."""
    return 3 if transformer.get("gated_linear_unit", True) else 2


def _attention(transformer: ModelFields) -> tuple[int, int]:
    """Returns two sizes of one attention layer: the number of weights by which each token is multiplied, and the number
    of dimensions of the two products (scores and outputs) for one pair of tokens, summed over heads."""
    hidden = transformer["hidden_size"]
    heads = transformer["num_attention_heads"]
    if not transformer.get("multi_latent_attention"):
        head = transformer["kv_channels"]
        gates = heads if transformer.get("attention_output_gate") else 0
        return hidden * head * (2 * heads + 2 * transformer["num_query_groups"] + gates), 2 * heads * head
    rotary = transformer["qk_pos_emb_head_dim"]
    value = transformer["v_head_dim"]
    key = transformer["qk_head_dim"] + rotary
    rank = transformer["kv_lora_rank"]
    query_rank = transformer["q_lora_rank"]
    query = hidden * query_rank + query_rank * heads * key if query_rank else hidden * heads * key
    latent = hidden * (rank + rotary) + rank * heads * (transformer["qk_head_dim"] + value)
    return query + latent + heads * value * hidden, heads * (key + value)


def _experts(transformer: ModelFields) -> int:
    """Returns the number of weights by which each token is multiplied in one MoE layer: selected experts, shared
    experts and router."""
    hidden = transformer["hidden_size"]
    chosen = transformer["moe_router_topk"] * transformer["moe_ffn_hidden_size"]
    shared = transformer.get("moe_shared_expert_intermediate_size") or 0
    gate = hidden if transformer.get("moe_shared_expert_gate") else 0
    return _matrices(transformer) * hidden * (chosen + shared) + hidden * transformer["num_moe_experts"] + gate
