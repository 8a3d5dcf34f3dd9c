"""Floating-point operations that training on a sequence takes, from the sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimx.models.state_space import PATTERN, StateSpace, layers_of
from slimx.numerics.chunk_sizes import CHUNK, STATE_CHUNK


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """Floating-point operations of forward and backward pass on one sequence of n tokens: linear n + quadratic n^2."""

    linear: float
    """Operations of every token: matrix products with weights."""
    quadratic: float
    """Operations of every pair of tokens: causal attention, where half of the pairs are masked."""

    def __call__(self, tokens: int) -> float:
        """FLOPs of a sequence of `tokens` tokens."""
        return self.linear * tokens + self.quadratic * tokens * tokens


def sequence_flops(transformer: dict[str, Any], vocab_size: int) -> SequenceFlops:
    """Counted from fields of megatron-core's TransformerConfig (or its MLA variant).

    A product of a vector with a weight matrix takes 2 FLOPs per weight in the forward pass and twice that in the
    backward pass; attention's two products take 2 FLOPs per pair of positions and dimension of a head (Narayanan et
    al., 2104.04473, appendix; extended to GQA, MLA and MoE as in Megatron-LM's `num_floating_point_operations`). A
    token counts the experts that it is sent to, not those that exist. In a layer with a window every token is counted
    to see all of it, as nearly all of a sequence much longer than the window do; with sparse attention, to see as many
    tokens as the indexer chooses, which itself looks at every pair and has no backward pass. A delta net takes as much
    for every token, however long the sequence, and so does a Mamba-2 layer: see `_delta_net` and `_state_space`.
    Norms, rotary embeddings and softmax are small, and layers of multi-token prediction change both terms nearly alike:
    they are left out.
    """
    layers, hidden = transformer["num_layers"], transformer["hidden_size"]
    weights, pairs = _attention(transformer)
    moe, linear = _moe_layers(transformer), delta_net_layers(transformer)
    attending, dense = attention_layers(transformer), dense_layers(transformer)
    per_token = attending * weights + hidden * vocab_size
    per_token += linear * _delta_net(transformer) if linear else 0
    per_token += len(layers_of(transformer, "M")) * _state_space(transformer) if transformer.get(PATTERN) else 0
    per_token += dense * _matrices(transformer) * hidden * transformer["ffn_hidden_size"]
    per_token += moe * _experts(transformer) if moe else 0
    local = _windowed_layers(transformer)
    if local:
        per_token += local * pairs * (transformer["window_size"][0] + 1)
    if chosen := transformer.get("dsa_indexer_topk"):
        per_token += layers * pairs * chosen
        read, scored = _indexer(transformer)
        return SequenceFlops(linear=3 * 2 * per_token + 2 * layers * read, quadratic=2 * layers * scored / 2)
    return SequenceFlops(linear=3 * 2 * per_token, quadratic=3 * 2 * (attending - local) * pairs / 2)


def attention_layers(transformer: dict[str, Any]) -> int:
    """Layers with attention."""
    if transformer.get(PATTERN):
        return len(layers_of(transformer, "*"))
    return transformer["num_layers"] - delta_net_layers(transformer)


def dense_layers(transformer: dict[str, Any]) -> int:
    """Layers with an MLP."""
    if transformer.get(PATTERN):
        return len(layers_of(transformer, "-"))
    return transformer["num_layers"] - _moe_layers(transformer)


def _matrices(transformer: dict[str, Any]) -> int:
    """Matrices of an MLP or an expert: gate, up and down, or the last two."""
    return 3 if transformer.get("gated_linear_unit", True) else 2


def _state_space(transformer: dict[str, Any]) -> int:
    """Products of a Mamba-2 layer for every token: with its weights, those of its convolution among them, and of the
    state-space rule."""
    sizes = StateSpace.of(transformer)
    weights = sizes.hidden * (sizes.projected + sizes.inner) + sizes.width * sizes.mixed
    return weights + sizes.rule(STATE_CHUNK)


def layer_products(transformer: dict[str, Any], vocab_size: int, length: int) -> dict[str, float]:
    """FLOPs of the forward pass for each token of a sequence of `length`, all layers together, by megatron-core's names
    of recomputed modules; what belongs to none of them is under `rest`, the output layer under `head`.

    `shared_experts` is a part of `moe` and not counted there. Norms and activations have no products."""
    total = sequence_flops(transformer, vocab_size)
    hidden, moe = transformer["hidden_size"], _moe_layers(transformer)
    out = {"core_attn": total.quadratic * length / 3, "head": 2.0 * hidden * vocab_size, "mla_up_proj": 0.0}
    matrices = _matrices(transformer)
    out["mlp"] = 2.0 * dense_layers(transformer) * matrices * hidden * transformer["ffn_hidden_size"]
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


def delta_net_layers(transformer: dict[str, Any]) -> int:
    """Layers that are gated delta nets."""
    return sum(transformer.get("linear_attention_freq") or ())


def _delta_net(transformer: dict[str, Any]) -> int:
    """Products of a delta net for every token: with its weights, those of its convolution among them, and of the chunk
    rule (Yang et al., 2412.06464, section 3.3) in chunks of 64 tokens, as flash-linear-attention cuts them.

    Per value head the rule multiplies key and query with the chunk's keys and the chunk's scores with its new values,
    and three vectors with the state. Its triangular systems are left out."""
    hidden, keys = transformer["hidden_size"], transformer["linear_num_key_heads"]
    values, wide = transformer["linear_num_value_heads"], transformer["linear_value_head_dim"]
    head = transformer["linear_key_head_dim"]
    mixed = 2 * keys * head + values * wide
    weights = hidden * (mixed + 2 * values * wide + 2 * values) + transformer["linear_conv_kernel_dim"] * mixed
    return weights + values * (CHUNK * (2 * head + wide) + 3 * head * wide)


def _windowed_layers(transformer: dict[str, Any]) -> int:
    """Layers whose attention sees a window only."""
    return sum(transformer["window_attn_skip_freq"]) if transformer.get("window_size") else 0


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
    # Sparse attention takes its two products with the latents themselves (2512.02556, section 2.1): each query chooses
    # other tokens, of which the heads share one key.
    pairs = 2 * rank + rotary if transformer.get("dsa_indexer_topk") else key + value
    return query + latent + heads * value * hidden, heads * pairs


def _indexer(transformer: dict[str, Any]) -> tuple[int, int]:
    """Sizes of one layer's indexer: weights that every token is multiplied with; dimensions of a pair's score, the sum
    over heads included."""
    heads, head, hidden = (transformer[name] for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "hidden_size"))
    return transformer["q_lora_rank"] * heads * head + hidden * (head + heads), heads * (head + 1)


def _moe_layers(transformer: dict[str, Any]) -> int:
    """Layers with experts; all of them unless `moe_layer_freq` lists which."""
    if not transformer.get("num_moe_experts"):
        return 0
    return sum(transformer.get("moe_layer_freq") or [1] * transformer["num_layers"])


def _experts(transformer: dict[str, Any]) -> int:
    """Weights of one MoE layer that every token is multiplied with, router and shared experts included."""
    hidden = transformer["hidden_size"]
    chosen = transformer["moe_router_topk"] * transformer["moe_ffn_hidden_size"]
    shared = transformer.get("moe_shared_expert_intermediate_size") or 0
    gate = hidden if transformer.get("moe_shared_expert_gate") else 0
    return _matrices(transformer) * hidden * (chosen + shared) + hidden * transformer["num_moe_experts"] + gate
