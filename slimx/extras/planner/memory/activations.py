"""Activations of one transformer layer that the backward pass needs, in bytes, part by part.

The count is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2205.05198,
section 4: what each operator of a layer saves, with tensor and sequence parallelism), taken further to what they do not
have: grouped query heads, latent attention (2412.19437, section 2.1.1), SwiGLU (three tensors of the inner size where
fused), experts that see top-k copies of each token, flash attention (2205.14135: one number per row and head instead of
the probabilities), and no dropout.

Two sets of kernels count differently. `engine`: Transformer Engine's fused norms, rotation and SwiGLU. `torch`: the
layers of `slimx.adapters.megatron.layers`, whose norms keep fp32 copies and whose SwiGLU keeps its steps. The latter is
what a run on the CPU has and what tests measure; the former has never been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slimx.layout.ranks import Sizes
from slimx.models.layer_kind import LayerKind, LayerParts

Kernels = Literal["engine", "torch"]
FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything besides the model that the bytes of a layer depend on."""

    tokens: int
    """Tokens of one micro-batch on one context-parallel rank."""
    length: int
    """Tokens of its longest sequence, on all context-parallel ranks together."""
    sizes: Sizes
    itemsize: int
    """Bytes of an element of parameters and activations."""
    kernels: Kernels
    materialised: bool
    """True if the attention keeps its probabilities (no flash kernel for it)."""
    masked: bool = False
    """True if torch's kernel gets a mask of every pair of tokens, and keys and values for every head (sinks)."""

    @property
    def share(self) -> float:
        """Tokens where the sequence is split over the tensor-parallel ranks (sequence parallelism)."""
        return self.tokens / self.sizes.tensor

    def norm(self, elements: float) -> float:
        """Bytes of a norm's input: fp32 copies of it and of what it becomes, or the input itself."""
        return elements * (2 * FP32 if self.kernels == "torch" else self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes that one layer keeps of one micro-batch on one rank."""

    input: float
    """Its input: all that remains of a layer that is recomputed whole."""
    attention_norm: float = 0.0
    """In front of the attention: what the norm keeps."""
    attention_input: float = 0.0
    """Values that the projections keep: the norm's output, and latents with their norms."""
    projected: float = 0.0
    """Queries, keys and values that the attention keeps, with their norms and rotation."""
    up_projected: float = 0.0
    """Those of `projected` that latent attention's up-projection makes again."""
    core: float = 0.0
    """Values that the attention keeps beyond its inputs: probabilities, or a number per row."""
    operands: float = 0.0
    """Those of `projected` that nothing but the attention keeps: rotated queries and keys, or all that it is given."""
    values: float = 0.0
    """The values, which the attention keeps as a part of a larger tensor."""
    context: float = 0.0
    """The attention's output, which the output projection keeps."""
    mlp_norm: float = 0.0
    mlp_input: float = 0.0
    """The second norm's output, which router, shared experts or the MLP keep."""
    router: float = 0.0
    """Scores, choices and their order."""
    dispatched: float = 0.0
    """Tokens as the experts get them."""
    inner: float = 0.0
    """First product of MLP or experts."""
    activated: float = 0.0
    """Steps of the activation and its result."""
    shared: float = 0.0
    """Products of the shared experts."""
    core_work: float = 0.0
    """While the attention's gradient is computed."""
    mlp_work: float = 0.0
    """While gradients of MLP or experts are computed."""
    gathered: float
    """In either: a projection's input and its gradient, gathered from the shards of the sequence."""
    itemsize: int
    """Bytes of an element of the model's dtype."""

    @property
    def mlp(self) -> float:
        """Kept of everything behind the attention."""
        kept = self.mlp_norm + self.mlp_input + self.router + self.dispatched + self.inner + self.activated
        return kept + self.shared

    @property
    def total(self) -> float:
        """Kept without recomputation."""
        return self.attention_norm + self.attention_input + self.projected + self.core + self.context + self.mlp

    @property
    def work(self) -> float:
        """Beside what is kept, in the layer's own backward pass: when it comes to the attention, what lies behind it is
        gone."""
        return max(self.mlp_work, self.core_work - self.mlp) + self.gathered


def layer_bytes(model: dict[str, Any], setting: Setting, parts: LayerParts, kind: LayerKind) -> LayerBytes:
    """Bytes of a layer with `parts`; `model`: fields of megatron-core's TransformerConfig."""
    hidden = setting.share * model["hidden_size"]
    found: dict[str, float] = {}
    if parts.mixer is not None:
        attention = _latent if model.get("multi_latent_attention") else _grouped
        found |= {"attention_norm": setting.norm(hidden)}
        found |= kind.mixer_bytes(model, setting, parts) or attention(model, setting)
    if parts.mlp is not None:
        found |= {"mlp_norm": setting.norm(hidden), "mlp_input": hidden * setting.itemsize}
        found |= _experts(model, setting) if parts.mlp == "experts" else _mlp(model, setting)
    return LayerBytes(
        input=hidden * setting.itemsize,
        gathered=_gathered(model, setting),
        itemsize=setting.itemsize,
        **found,
    )


def _gathered(model: dict[str, Any], s: Setting) -> float:
    return 2 * s.tokens * model["hidden_size"] * s.itemsize if s.sizes.tensor > 1 else 0.0


def _grouped(model: dict[str, Any], s: Setting) -> dict[str, float]:
    """Attention with grouped query heads; heads are split over the tensor-parallel ranks, tokens are whole."""
    head, heads = model["kv_channels"], model["num_attention_heads"] / s.sizes.tensor
    groups = max(1, model["num_query_groups"] / s.sizes.tensor)
    query, key = s.tokens * heads * head, s.tokens * groups * head
    # Values are a view of the projections' output, which therefore stays whole.
    projected = (query + 2 * key) * s.itemsize
    if model.get("attention_output_gate"):
        projected += 3 * query * s.itemsize  # the gate, its sigmoid, and the output before it
    if model.get("qk_layernorm"):
        projected += s.norm(query + key)
    projected += (query + key) * s.itemsize  # rotated
    if s.kernels == "torch":
        projected += 4 * s.tokens * head * s.itemsize  # sine and cosine, for queries and for keys
        projected += 2 * key * s.itemsize * (s.sizes.context - 1)  # keys and values of the other ranks
    return {
        "attention_input": s.share * model["hidden_size"] * s.itemsize,
        "projected": projected,
        **_core(s, heads, query, key, key, own=query + key, part=key),
    }


def _latent(model: dict[str, Any], s: Setting) -> dict[str, float]:
    """Multi-head latent attention: every rank makes the whole latents, and its own heads of them."""
    heads = model["num_attention_heads"] / s.sizes.tensor
    rotary, value = model["qk_pos_emb_head_dim"], s.tokens * heads * model["v_head_dim"]
    key = s.tokens * heads * (model["qk_head_dim"] + rotary)
    latents = s.share * ((model["q_lora_rank"] or 0) + model["kv_lora_rank"])
    made = s.tokens * heads * model["qk_head_dim"] + value  # keys without rotation and values: one product
    projected = 0.0 if s.materialised else (2 * key + made) * s.itemsize
    if s.kernels == "torch":
        projected += 4 * s.tokens * rotary * s.itemsize
        projected += (key + value) * s.itemsize * (s.sizes.context - 1)
    return {
        "attention_input": s.share * model["hidden_size"] * s.itemsize + s.norm(latents) + latents * s.itemsize,
        "projected": projected,
        "up_projected": projected,
        **_core(s, heads, key, key, value, own=0.0 if s.materialised else 2 * key, part=value),
    }


def _core(
    s: Setting, heads: float, query: float, key: float, value: float, *, own: float, part: float
) -> dict[str, float]:
    """Bytes of scaled dot products; `query`, `key`, `value`: elements of each (the output is as wide as values). `own`:
    those that nothing else keeps, `part`: those that are a part of a larger tensor."""
    context = query if value == key else value
    alike = {"operands": own * s.itemsize, "values": part * s.itemsize, "context": context * s.itemsize}
    if s.materialised:
        # fp32: scaled queries and keys, values, and the probabilities of every pair of tokens of a sequence.
        pairs = heads * s.tokens * s.length * FP32
        core = (query + (key + value) * s.sizes.context) * FP32 + pairs + _mask(s)
        return {"core": core, "core_work": 2 * pairs, **alike}
    work = (query + key + value) * s.itemsize
    if s.masked:
        # `slimx.numerics.attention`: one dimension more for the sinks, rounded up to 8; no key without its head.
        each = heads * s.tokens * (query / (heads * s.tokens) + 8)
        laid = 3 * each * s.itemsize
        mask = s.tokens * s.length * (s.itemsize + 1)  # as it is made, and as the kernel takes it
        return {"core": heads * s.tokens * FP32 + laid + mask, "core_work": laid + each * FP32, **alike}
    return {"core": heads * s.tokens * FP32 + _mask(s), "core_work": work, **alike}


def _mask(s: Setting) -> float:
    """Bytes of a rank's attention mask: plain torch has one for every pair where context parallelism cuts sequences."""
    return s.tokens * s.length * s.itemsize if s.kernels == "torch" and s.sizes.context > 1 else 0.0


def _steps(model: dict[str, Any], s: Setting, inner: float, *, weighted: bool) -> float:
    """Elements that an activation keeps beside its input: its result; with plain torch also silu and the linear part of
    a gated one, or the relu of a squared one, and, where the router's weights are applied, their product before that.
    """
    steps = 2 + (_halves(model) == 2) + weighted if s.kernels == "torch" else 1
    return inner * steps


def _halves(model: dict[str, Any]) -> int:
    """Numbers of a first product for each number of its activation."""
    return 2 if model.get("gated_linear_unit", True) else 1


def _mlp(model: dict[str, Any], s: Setting) -> dict[str, float]:
    inner = s.tokens * model["ffn_hidden_size"] / s.sizes.tensor
    return {
        "inner": _halves(model) * inner * s.itemsize,
        "activated": _steps(model, s, inner, weighted=False) * s.itemsize,
        "mlp_work": 3 * inner * s.itemsize,
    }


def _experts(model: dict[str, Any], s: Setting) -> dict[str, float]:
    """Experts with even load: each rank of an expert's tensor-parallel group gets the tokens of all of them."""
    chosen, experts = model["moe_router_topk"], model["num_moe_experts"]
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
