"""Family Nemotron-H and Nemotron-3 (Nano 30B-A3B and tiny models). Each layer is Mamba-2, attention without position
embeddings, an MLP or experts, in an order that config.json defines. MLPs and experts use squared ReLU without gates,
and experts are selected as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from slimx.extras.families.sigmoid_router import router_fields, unsupported_router
from slimx.extras.recurrent.hybrid import HybridLayers
from slimx.extras.recurrent.state_space import KINDS, Kind, StateSpace
from slimx.layout.maps import Cut, Sections
from slimx.layout.table import Row, Table
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.decoder import unsupported_field
from slimx.models.engine_rows import no_engine
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import LayerKind
from slimx.models.rows import Attention, Layer, embedding, head

ARCHITECTURE = "NemotronHForCausalLM"
_NAMES: dict[str, Kind] = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Name of a layer kind in transformers' field `layers_block_type` -> its character in a pattern (`Kind`)."""
_INFINITY = float("inf")
_WITHOUT_EFFECT = (
    # Choice of kernels and their chunk size; dtype of an engine's states; expand follows from the number of heads.
    *("chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "expand"),
    # Initial values of time steps. Megatron-LM and SGLang do not bound time steps, although transformers does
    # (docs/models.md).
    *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    # Attention has no position embeddings, also in transformers and SGLang.
    *("rope_theta", "partial_rotary_factor"),
    # Multi-token prediction layers, which are not supported.
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    "num_logits_to_keep",
    "moe_shared_expert_overlap",
)
"""Fields of config.json that never change results."""
_EXPERT_FIELDS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group", "norm_topk_prob"),
    *("n_shared_experts", "moe_shared_expert_intermediate_size", "routed_scaling_factor"),
)
"""Fields of config.json that have no effect in a model without experts."""


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    pattern = _pattern(hf)
    for name in _WITHOUT_EFFECT:
        hf.get(name)
    if "E" not in pattern:
        for name in _EXPERT_FIELDS:
            hf.get(name)
    odd = next((kind for kind in pattern if kind not in KINDS), None)
    if odd is not None:
        return f"hybrid_override_pattern with a layer of kind {odd}"
    low, high = hf.get("time_step_limit") or (0.0, _INFINITY)
    if low > 0 or high not in (
        _INFINITY,
        {"__float__": "Infinity"},
    ):  # transformers writes this, because JSON has no infinity
        return f"time_step_limit {[low, high]}, which megatron-core's mixer does not apply,"
    if hf.get("moe_latent_size") is not None:
        # megatron-core has its projections only with Transformer Engine, so they were never tested.
        return f"moe_latent_size {hf['moe_latent_size']}"
    if "E" in pattern:
        problem = unsupported_router(hf)
        if problem:
            return problem
        if hf.get("n_shared_experts") not in (None, 1):
            return f"n_shared_experts {hf['n_shared_experts']}"
    return unsupported_field(
        hf,
        ("mlp_hidden_act", "relu2"),
        ("mamba_hidden_act", "silu"),
        ("conv_kernel", 4),
        ("layer_norm_epsilon", 1e-5),  # fixed in the norm of megatron-core's mixer
        ("norm_eps", hf["layer_norm_epsilon"]),
        ("use_conv_bias", True),
        ("use_bias", False),
        ("mamba_proj_bias", False),
        ("mlp_bias", False),
        ("attention_bias", False),
        ("residual_in_fp32", False),
        ("tie_word_embeddings", False),
        ("hidden_dropout", 0),
        ("sliding_window", None),
        ("num_nextn_predict_layers", 0),
        ("quantization_config", None),
    )


def _pattern(hf: HfConfig) -> str:
    """Returns the pattern of the model's layers, one `Kind` per layer, from the config.json field of published
    checkpoints or from the field that transformers writes. Raises ValueError if fields disagree."""
    names = hf.get("layers_block_type")
    pattern: str | None = hf.get("hybrid_override_pattern")
    if names is None:
        pattern = hf["hybrid_override_pattern"]
    else:
        named = "".join(_NAMES.get(name, "?") for name in names)
        if pattern not in (None, named):
            raise ValueError(f"layers_block_type is {named}, but hybrid_override_pattern is {pattern}")
        pattern = named
    layers = hf.get("num_hidden_layers")
    if layers not in (None, len(pattern)):
        raise ValueError(f"num_hidden_layers is {layers}, but the pattern has {len(pattern)} layers")
    return pattern


def _layers(hf: HfConfig, kind: Kind) -> tuple[int, ...]:
    return tuple(layer for layer, layer_kind in enumerate(_pattern(hf)) if layer_kind == kind)


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    attention = Attention.of(hf)
    pattern = _pattern(hf)
    fields = {
        "num_layers": len(pattern),
        "is_hybrid_model": True,
        "hidden_size": attention.hidden,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.groups,
        "kv_channels": attention.head,
        "ffn_hidden_size": hf["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["layer_norm_epsilon"],
        "activation_func": "squared_relu",
        "gated_linear_unit": False,
        "add_bias_linear": False,
        "mamba_num_heads": hf["mamba_num_heads"],
        "mamba_head_dim": hf["mamba_head_dim"],
        "mamba_num_groups": hf["n_groups"],
        "mamba_state_dim": hf["ssm_state_size"],
    }
    if "E" not in pattern:
        return fields
    return {
        **fields,
        "moe_layer_freq": [int(kind == "E") for kind in pattern],
        "moe_shared_expert_intermediate_size": hf["moe_shared_expert_intermediate_size"],
        **router_fields(hf),
    }


def layer_kind(hf: HfConfig) -> LayerKind:
    """Returns the properties of the model's decoder, including its layer pattern with one character per layer, such as
    "MEM*E"."""
    return HybridLayers(_pattern(hf))


def gpt_arguments(hf: HfConfig) -> dict[str, Any]:
    """Returns the arguments of megatron-core's HybridModel other than the TransformerConfig, the layer spec and the
    pattern."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "none",
        "share_embeddings_and_output_weights": False,
    }


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because multi-token prediction layers are not supported."""
    hidden = hf["hidden_size"]
    experts = hf["n_routed_experts"] if "E" in _pattern(hf) else 0
    mamba = _layer(hf, "M")
    attention = _layer(hf, "*")
    dense = _layer(hf, "-")
    word = embedding(hf)
    norm, output = head(hf)
    rows = [replace(word, sources=(("backbone.embeddings.weight", word.sources[0][1]),))]
    if mamba.layers:
        rows += _mamba(mamba, StateSpace.of(transformer_config(hf)))
    if attention.layers:
        rows += _attention(attention, Attention.of(hf))
    if dense.layers:
        rows += _mlp(dense, hidden, hf["intermediate_size"])
    if experts:
        rows += _experts(_layer(hf, "E"), hf)
    rows.append(replace(norm, name="decoder.final_norm.weight", sources=(("backbone.norm_f.weight", (hidden,)),)))
    rows.append(output)
    # Reading fp8 checkpoints of this family was never tested.
    return Table(tuple(replace(row, quantized=False) for row in rows), layers=len(_pattern(hf)), experts=experts)


def _layer(hf: HfConfig, kind: Kind) -> Layer:
    return Layer("decoder.layers.{layer}.", "backbone.layers.{layer}.", layers=_layers(hf, kind))


def _mamba(layer: Layer, sizes: StateSpace) -> tuple[Row, ...]:
    """Returns the weight-table rows of a Mamba-2 mixer and of the norm before it. Groups, with their heads, are split
    over tensor-parallel ranks."""
    groups = sizes.groups
    inner = sizes.inner // groups
    state = sizes.state
    kinds = {"z": inner, "x": inner, "B": state, "C": state, "dt": sizes.heads // groups}
    convolution = {kind: kinds[kind] for kind in ("x", "B", "C")}
    vectors = [
        Row(
            f"{layer.prefix}mixer.{name}",
            ((f"{layer.source_prefix}mixer.{name}", (sizes.heads,)),),
            axis=0,
            layers=layer.layers,
            dtype=dtype,
        )
        for name, dtype in (("A_log", "float32"), ("D", "float32"), ("dt_bias", None))
    ]
    return (
        layer.norm("mixer.in_proj.layer_norm_weight", "norm", sizes.hidden),
        layer.row(
            "mixer.in_proj.weight",
            [("mixer.in_proj", (sizes.projected, sizes.hidden))],
            **_sections(groups, kinds),
        ),
        layer.row(
            "mixer.conv1d_weight",
            [("mixer.conv1d", (sizes.mixed, 1, sizes.width))],
            **_sections(groups, convolution),
        ),
        layer.row(
            "mixer.conv1d_bias",
            [("mixer.conv1d", (sizes.mixed,))],
            kind="bias",
            **_sections(groups, convolution),
        ),
        *vectors,
        layer.row("mixer.norm.weight", [("mixer.norm", (sizes.inner,))], axis=0),
        layer.linear("mixer.out_proj.weight", "mixer.out_proj", (sizes.hidden, sizes.inner), axis=1),
    )


def _sections(groups: int, kinds: dict[str, int]) -> dict[str, Any]:
    """Returns the fields `map`, `axis` and `sections` of a weight-table `Row` whose checkpoint tensor stores several
    kinds of rows one after the other. Each kind is split over tensor-parallel ranks. `groups`: number of groups;
    `kinds`: name of each kind -> its rows per group."""
    starts = accumulate((groups * rows for rows in kinds.values()), initial=0)
    cuts = [Cut(0, start, rows, rows) for start, rows in zip(starts, kinds.values(), strict=False)]
    return {"map": Sections(groups, tuple(cuts)), "axis": 0, "sections": tuple(kinds)}


def _attention(layer: Layer, sizes: Attention) -> tuple[Row, ...]:
    """Returns the weight-table rows of grouped-query attention and of the norm before it. Checkpoints name the
    attention module `mixer`, like the modules of all other kinds of layers."""
    rows = []
    for row in layer.attention(sizes):
        sources = []
        for name, shape in row.sources:
            renamed = name.replace("self_attn.", "mixer.").replace("input_layernorm", "norm")
            sources.append((renamed, shape))
        rows.append(replace(row, sources=tuple(sources)))
    return tuple(rows)


def _plain_mlp(layer: Layer, name: str, source: str, hidden: int, inner: int, suffix: str = "") -> tuple[Row, Row]:
    """Returns the weight-table rows of the ungated MLP `name`: its up and down projections. `source`: prefix of the
    checkpoint's names; `inner`: intermediate size. For experts, `source` contains `{expert}`, and `suffix` is
    `{expert}`."""
    return (
        layer.linear(f"{name}.linear_fc1.weight{suffix}", f"{source}up_proj", (inner, hidden), axis=0),
        layer.linear(f"{name}.linear_fc2.weight{suffix}", f"{source}down_proj", (hidden, inner), axis=1),
    )


def _mlp(layer: Layer, hidden: int, inner: int) -> tuple[Row, ...]:
    """Returns the weight-table rows of an MLP layer and of the norm before it. `inner`: intermediate size."""
    return layer.norm("mlp.linear_fc1.layer_norm_weight", "norm", hidden), *_plain_mlp(
        layer, "mlp", "mixer.", hidden, inner
    )


def _experts(layer: Layer, hf: HfConfig) -> tuple[Row, ...]:
    """Returns the weight-table rows of an MoE layer: the router with a bias that is used only to select experts, the
    routed experts, the shared expert, and the norm before them."""
    hidden = hf["hidden_size"]
    experts = hf["n_routed_experts"]
    inner = hf["moe_intermediate_size"]
    shared = hf["moe_shared_expert_intermediate_size"]
    bias = "e_score_correction_bias"
    return (
        layer.norm("pre_mlp_layernorm.weight", "norm", hidden),
        layer.row("mlp.router.weight", [("mixer.gate", (experts, hidden))]),
        layer.row("mlp.router.expert_bias", [("mixer.gate", (experts,))], kind=bias, dtype="float32"),
        *_plain_mlp(layer, "mlp.shared_experts", "mixer.shared_experts.", hidden, shared),
        *_plain_mlp(layer, "mlp.experts", "mixer.experts.{expert}.", hidden, inner, suffix="{expert}"),
    )


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Raises SlimxError, because this family can only be trained."""
    raise no_engine(ARCHITECTURE, "SGLang's layout of Mamba-2 layers, on which a publication depends, was never tested")
