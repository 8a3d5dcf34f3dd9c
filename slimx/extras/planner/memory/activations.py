"""Activations that one transformer layer keeps for the backward pass, in bytes, part by part.

The count follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2205.05198,
section 4: saved tensors of each operator of a layer, with tensor and sequence parallelism), extended by grouped-query
attention, latent attention (2412.19437, section 2.1.1), SwiGLU (three tensors of the inner size if fused), experts with
top-k copies of each token, flash attention (2205.14135: one number per token and head instead of the probabilities),
and no dropout.

Two sets of kernels are counted differently. `engine`: Transformer Engine's fused norms, rotation and SwiGLU. `torch`:
the layers of `slimx.adapters.megatron.layers`, whose norms keep fp32 copies and whose SwiGLU keeps intermediate
tensors. CPU runs use the latter, and tests measure it; the former has never been measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slimx.layout.ranks import Sizes
from slimx.models.layer_kind import LayerKind, LayerParts

Kernels = Literal["engine", "torch"]
FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Properties of a micro-batch, its ranks and their kernels that, together with the model, determine the size of a
    layer's activations."""

    tokens: int
    """Number of a micro-batch's tokens on one context-parallel rank."""
    length: int
    """Number of tokens in the micro-batch's longest sequence, over all context-parallel ranks."""
    sizes: Sizes
    itemsize: int
    """Bytes per element of parameters and activations."""
    kernels: Kernels
    materialized: bool
    """True if attention keeps its probabilities, because no flash attention kernel supports it."""
    masked: bool = False
    """True if torch's attention kernel receives an explicit mask with one element per pair of tokens, and keys and
    values repeated for every query head. Attention sinks require both."""

    @property
    def share(self) -> float:
        """Number of tokens per tensor-parallel rank in the parts of a layer in which ranks divide the sequence
        (sequence parallelism)."""
        return self.tokens / self.sizes.tensor

    def norm(self, elements: float) -> float:
        """Returns the number of bytes that a norm of `elements` elements keeps: with torch's kernels, fp32 copies of
        its input and output; otherwise only its input."""
        return elements * (2 * FP32 if self.kernels == "torch" else self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes that one layer keeps between the forward and the backward pass, for one micro-batch on one rank."""

    input: float
    """Bytes of the layer's input, the only tensor that a completely recomputed layer keeps."""
    attention_norm: float = 0.0
    """Bytes kept by the norm before attention."""
    attention_input: float = 0.0
    """Bytes kept by attention's input projections: the norm's output, and latents with their norms."""
    projected: float = 0.0
    """Bytes of queries, keys and values that attention keeps, including those kept by their norms and rotation."""
    up_projected: float = 0.0
    """Bytes, included in `projected`, that are not kept if latent attention's up-projection is recomputed
    (mla_up_proj)."""
    core: float = 0.0
    """Bytes kept by attention in addition to its inputs: the probabilities or, with flash attention, one number per
    token and head."""
    operands: float = 0.0
    """Bytes of the tensors in `projected` that only attention keeps: the queries and keys after rotation."""
    values: float = 0.0
    """Bytes of the values, which attention keeps as part of a larger tensor."""
    context: float = 0.0
    """Bytes of the attention output, which the output projection keeps."""
    mlp_norm: float = 0.0
    mlp_input: float = 0.0
    """Bytes of the second norm's output, which the router, the shared experts or the MLP keep."""
    router: float = 0.0
    """Bytes of the router's scores, the chosen experts and the permutation that sorts tokens by expert."""
    dispatched: float = 0.0
    """Bytes of the tokens that are dispatched to this rank's experts."""
    inner: float = 0.0
    """Bytes of the first linear layer's output, in the MLP or in the experts."""
    activated: float = 0.0
    """Bytes of the activation function's intermediate tensors and its result."""
    shared: float = 0.0
    """Bytes kept by the linear layers of the shared experts."""
    core_work: float = 0.0
    """Bytes of workspace for computing the gradient of attention."""
    mlp_work: float = 0.0
    """Bytes of workspace for computing the gradients of the MLP or the experts."""
    gathered: float
    """Bytes of workspace for computing the gradients of both attention and MLP: the input of a linear layer and its
    gradient, gathered from the shards of the sequence."""
    itemsize: int
    """Bytes per element of the model's dtype."""

    @property
    def mlp(self) -> float:
        """Bytes kept by the part of a layer that follows attention: its norm, the router, and the MLP or the
        experts."""
        kept = self.mlp_norm + self.mlp_input + self.router + self.dispatched + self.inner + self.activated
        return kept + self.shared

    @property
    def total(self) -> float:
        """Bytes that the layer keeps if nothing is recomputed."""
        return self.attention_norm + self.attention_input + self.projected + self.core + self.context + self.mlp

    @property
    def work(self) -> float:
        """Bytes of workspace that the layer's backward pass needs in addition to its activations. The activations that
        follow attention have been freed when the gradient of attention is computed, so the workspace for this gradient
        counts only as far as it exceeds them."""
        return max(self.mlp_work, self.core_work - self.mlp) + self.gathered


def layer_bytes(model: dict[str, Any], setting: Setting, parts: LayerParts, kind: LayerKind) -> LayerBytes:
    """Returns the sizes in bytes of the tensors that a layer keeps for the backward pass. `parts`: the layer's mixer
    (attention or recurrent) and its MLP (dense or experts). `model`: fields of megatron-core's TransformerConfig."""
    hidden = setting.share * model["hidden_size"]
    nbytes: dict[str, float] = {}
    if parts.mixer is not None:
        attention = _latent if model.get("multi_latent_attention") else _grouped
        nbytes |= {"attention_norm": setting.norm(hidden)}
        nbytes |= kind.mixer_bytes(model, setting, parts) or attention(model, setting)
    if parts.mlp is not None:
        nbytes |= {"mlp_norm": setting.norm(hidden), "mlp_input": hidden * setting.itemsize}
        if parts.mlp == "experts":
            nbytes |= _experts(model, setting)
        else:
            nbytes |= _mlp(model, setting)
    return LayerBytes(
        input=hidden * setting.itemsize,
        gathered=_gathered(model, setting),
        itemsize=setting.itemsize,
        **nbytes,
    )


def _gathered(model: dict[str, Any], s: Setting) -> float:
    if s.sizes.tensor == 1:
        return 0.0
    return 2 * s.tokens * model["hidden_size"] * s.itemsize


def _grouped(model: dict[str, Any], s: Setting) -> dict[str, float]:
    """Returns the sizes in bytes, by field of LayerBytes, of the activations of grouped-query attention. Heads are
    divided among the tensor-parallel ranks; tokens are not."""
    head = model["kv_channels"]
    heads = model["num_attention_heads"] / s.sizes.tensor
    groups = max(1, model["num_query_groups"] / s.sizes.tensor)
    query = s.tokens * heads * head
    key = s.tokens * groups * head
    # Values are a view of the projections' output, so the complete output is kept.
    projected = (query + 2 * key) * s.itemsize
    if model.get("attention_output_gate"):
        projected += 3 * query * s.itemsize  # the gate, its sigmoid, and the output before it
    if model.get("qk_layernorm"):
        projected += s.norm(query + key)
    projected += (query + key) * s.itemsize  # rotated
    if s.kernels == "torch":
        projected += 4 * s.tokens * head * s.itemsize  # sine and cosine for queries and for keys
        projected += (
            2 * key * s.itemsize * (s.sizes.context - 1)
        )  # keys and values from the other context-parallel ranks
    return {
        "attention_input": s.share * model["hidden_size"] * s.itemsize,
        "projected": projected,
        **_core(s, heads, query, key, key, exclusive=query + key, part=key),
    }


def _latent(model: dict[str, Any], s: Setting) -> dict[str, float]:
    """Returns the sizes in bytes, by field of LayerBytes, of the activations of multi-head latent attention. Every rank
    computes the complete latents, and from them the queries, keys and values for its heads."""
    heads = model["num_attention_heads"] / s.sizes.tensor
    rotary = model["qk_pos_emb_head_dim"]
    value = s.tokens * heads * model["v_head_dim"]
    key = s.tokens * heads * (model["qk_head_dim"] + rotary)
    latents = s.share * ((model["q_lora_rank"] or 0) + model["kv_lora_rank"])
    made = s.tokens * heads * model["qk_head_dim"] + value  # unrotated keys and values are one product
    projected = 0.0
    exclusive = 0.0
    if not s.materialized:
        projected = (2 * key + made) * s.itemsize
        exclusive = 2 * key
    if s.kernels == "torch":
        projected += 4 * s.tokens * rotary * s.itemsize
        projected += (key + value) * s.itemsize * (s.sizes.context - 1)
    return {
        "attention_input": s.share * model["hidden_size"] * s.itemsize + s.norm(latents) + latents * s.itemsize,
        "projected": projected,
        "up_projected": projected,
        **_core(s, heads, key, key, value, exclusive=exclusive, part=value),
    }


def _core(
    s: Setting, heads: float, query: float, key: float, value: float, *, exclusive: float, part: float
) -> dict[str, float]:
    """Returns the sizes in bytes, by field of LayerBytes, of the activations of scaled dot-product attention.

    `heads`: heads per rank. `query`, `key`, `value`: number of elements of each (the output is as large as the values).
    `exclusive`: number of elements of these tensors that only attention keeps. `part`: number of elements of the values
    if attention keeps them as a view of a larger tensor."""
    context = query if value == key else value
    alike = {"operands": exclusive * s.itemsize, "values": part * s.itemsize, "context": context * s.itemsize}
    if s.materialized:
        # fp32: scaled queries and keys, values, and the probabilities of every pair of tokens of a sequence.
        pairs = heads * s.tokens * s.length * FP32
        core = (query + (key + value) * s.sizes.context) * FP32 + pairs + _mask(s)
        return {"core": core, "core_work": 2 * pairs, **alike}
    work = (query + key + value) * s.itemsize
    if s.masked:
        # `slimx.numerics.attention`: one more dimension for the sinks, rounded up to 8, and a key per query head.
        padded = heads * s.tokens * (query / (heads * s.tokens) + 8)
        inputs = 3 * padded * s.itemsize
        mask = s.tokens * s.length * (s.itemsize + 1)  # in the form in which it is built, and in the kernel's form
        return {"core": heads * s.tokens * FP32 + inputs + mask, "core_work": inputs + padded * FP32, **alike}
    return {"core": heads * s.tokens * FP32 + _mask(s), "core_work": work, **alike}


def _mask(s: Setting) -> float:
    """Returns the size in bytes of a rank's attention mask: with plain torch and context parallelism, one element per
    query-key pair; otherwise 0."""
    if s.kernels != "torch" or s.sizes.context == 1:
        return 0.0
    return s.tokens * s.length * s.itemsize


def _steps(model: dict[str, Any], s: Setting, inner: float, *, weighted: bool) -> float:
    """Returns the number of elements that an activation function keeps in addition to its input.

    Every activation function keeps its result. Plain torch also keeps the silu and the linear part of a gated
    activation, or the relu of a squared one. `weighted`: True if plain torch also keeps the product before it is
    multiplied by the router's weights. `inner`: number of elements of the result."""
    if s.kernels != "torch":
        return inner
    tensors = 2
    if _halves(model) == 2:
        tensors += 1
    if weighted:
        tensors += 1
    return inner * tensors


def _halves(model: dict[str, Any]) -> int:
    """Returns the number of elements that the first linear layer computes per element of the activation function's
    result: 2 for a gated function, otherwise 1."""
    return 2 if model.get("gated_linear_unit", True) else 1


def _mlp(model: dict[str, Any], s: Setting) -> dict[str, float]:
    inner = s.tokens * model["ffn_hidden_size"] / s.sizes.tensor
    return {
        "inner": _halves(model) * inner * s.itemsize,
        "activated": _steps(model, s, inner, weighted=False) * s.itemsize,
        "mlp_work": 3 * inner * s.itemsize,
    }


def _experts(model: dict[str, Any], s: Setting) -> dict[str, float]:
    """Returns the sizes in bytes, by field of LayerBytes, of the activations of experts, assuming balanced load. Each
    rank of an expert's tensor-parallel group receives the tokens of all ranks of the group."""
    chosen = model["moe_router_topk"]
    experts = model["num_moe_experts"]
    copies = s.share * chosen * s.sizes.expert_tensor
    inner = copies * model["moe_ffn_hidden_size"] / s.sizes.expert_tensor
    shared = s.tokens * (model.get("moe_shared_expert_intermediate_size") or 0) / s.sizes.tensor
    return {
        "router": s.share * (12 * experts + 32 * chosen),
        "dispatched": copies * model["hidden_size"] * s.itemsize,
        "inner": _halves(model) * inner * s.itemsize,
        "activated": _steps(model, s, inner, weighted=True) * s.itemsize,
        "shared": (_halves(model) * shared + _steps(model, s, shared, weighted=False)) * s.itemsize,
        "mlp_work": (3 * inner + 2 * copies * model["hidden_size"]) * s.itemsize,
    }
