"""Nemotron-H and Nemotron-3 (Nano 30B-A3B and tiny ones): layers of Mamba-2, of attention without positions, of MLPs
and of experts, in an order of their own; squared ReLU without gates, experts chosen as DeepSeek-V3 chooses them."""

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
from slimx.models.decoder import unusual
from slimx.models.engine_rows import no_engine
from slimx.models.fields import Fields
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
"""Kinds of layers as transformers has written them in `layers_block_type`."""
_INFINITY = float("inf")
_WITHOUT_EFFECT = (
    # how kernels cut sequences, and which of them; in which dtype an engine keeps states; said by numbers of heads
    *("chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "expand"),
    # with what steps began: Megatron-LM and SGLang bound none of them, though transformers does (docs/models.md)
    *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    # attention has no positions here, nor in transformers or SGLang
    *("rope_theta", "partial_rotary_factor"),
    # of layers of multi-token prediction, of which there must be none
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    "num_logits_to_keep",
    "moe_shared_expert_overlap",
)
"""Fields that change nothing that is computed, whatever their value."""
_OF_EXPERTS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group", "norm_topk_prob"),
    *("n_shared_experts", "moe_shared_expert_intermediate_size", "routed_scaling_factor"),
)
"""Fields that change nothing in a model without layers of experts."""


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json that cannot be built; None if all can."""
    for name in (*_WITHOUT_EFFECT, *(() if "E" in _pattern(hf) else _OF_EXPERTS)):
        hf.get(name)
    if odd := next((kind for kind in _pattern(hf) if kind not in KINDS), None):
        return f"hybrid_override_pattern of a layer {odd}"
    low, high = hf.get("time_step_limit") or (0.0, _INFINITY)
    if low > 0 or high not in (_INFINITY, {"__float__": "Infinity"}):  # JSON has no infinity: transformers writes so
        return f"time_step_limit {[low, high]}, which megatron-core's mixer does not apply,"
    if hf.get("moe_latent_size") is not None:
        # Its projections are Transformer Engine's layers alone, without which nothing here could be tested.
        return f"moe_latent_size {hf['moe_latent_size']}"
    if "E" in _pattern(hf):
        if problem := unsupported_router(hf):
            return problem
        if hf.get("n_shared_experts") not in (None, 1):
            return f"n_shared_experts {hf['n_shared_experts']}"
    return unusual(
        hf,
        ("mlp_hidden_act", "relu2"),
        ("mamba_hidden_act", "silu"),
        ("conv_kernel", 4),
        ("layer_norm_epsilon", 1e-5),  # the mixer's own norm has no other
        ("norm_eps", hf["layer_norm_epsilon"]),
        ("use_conv_bias", True),
        *((name, False) for name in ("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias")),
        *((name, False) for name in ("residual_in_fp32", "tie_word_embeddings")),
        ("hidden_dropout", 0),
        ("sliding_window", None),
        ("num_nextn_predict_layers", 0),
        ("quantization_config", None),
    )


def _pattern(hf: Fields) -> str:
    """A character per layer, from what the published config.json says or what transformers writes."""
    names, pattern = hf.get("layers_block_type"), hf.get("hybrid_override_pattern")
    if names is None and pattern is None:
        return hf["hybrid_override_pattern"]
    if names is not None:
        named = "".join(_NAMES.get(name, "?") for name in names)
        if pattern not in (None, named):
            raise ValueError(f"layers_block_type is {named} and hybrid_override_pattern {pattern}")
        pattern = named
    if (layers := hf.get("num_hidden_layers")) not in (None, len(pattern)):
        raise ValueError(f"num_hidden_layers is {layers} and the pattern has {len(pattern)}")
    return pattern


def _layers(hf: Fields, kind: Kind) -> tuple[int, ...]:
    return tuple(layer for layer, each in enumerate(_pattern(hf)) if each == kind)


def transformer_config(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define the model (no parallelism, no dtype)."""
    attention, pattern = Attention.of(hf), _pattern(hf)
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


def layer_kind(hf: Fields) -> LayerKind:
    """The pattern of layers."""
    return HybridLayers(_pattern(hf))


def gpt_arguments(hf: Fields) -> dict[str, Any]:
    """Arguments of megatron-core's HybridModel besides its TransformerConfig, layer spec and pattern."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "none",
        "share_embeddings_and_output_weights": False,
    }


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    hidden, experts = hf["hidden_size"], hf["n_routed_experts"] if "E" in _pattern(hf) else 0
    of = {
        kind: Layer("decoder.layers.{layer}.", "backbone.layers.{layer}.", layers=_layers(hf, kind)) for kind in KINDS
    }
    (norm, output), word = head(hf), embedding(hf)
    rows = (
        replace(word, sources=(("backbone.embeddings.weight", word.sources[0][1]),)),
        *(_mamba(of["M"], StateSpace.of(transformer_config(hf))) if of["M"].layers else ()),
        *(_attention(of["*"], Attention.of(hf)) if of["*"].layers else ()),
        *(_mlp(of["-"], hidden, hf["intermediate_size"]) if of["-"].layers else ()),
        *(_experts(of["E"], hf) if experts else ()),
        replace(norm, name="decoder.final_norm.weight", sources=(("backbone.norm_f.weight", (hidden,)),)),
        output,
    )
    # No fp8 checkpoint of the family was ever read.
    return Table(tuple(replace(row, quantised=False) for row in rows), layers=len(_pattern(hf)), experts=experts)


def _mamba(at: Layer, sizes: StateSpace) -> tuple[Row, ...]:
    """The norm before a Mamba-2 mixer and the mixer: each rank of a tensor-parallel group has its share of the groups,
    with their heads."""
    groups = sizes.groups
    share, state = sizes.inner // groups, sizes.state
    kinds = {"z": share, "x": share, "B": state, "C": state, "dt": sizes.heads // groups}
    convolution = {kind: kinds[kind] for kind in ("x", "B", "C")}
    vectors = [
        Row(
            f"{at.here}mixer.{name}",
            ((f"{at.there}mixer.{name}", (sizes.heads,)),),
            axis=0,
            layers=at.layers,
            dtype=dtype,
        )
        for name, dtype in (("A_log", "float32"), ("D", "float32"), ("dt_bias", None))
    ]
    return (
        at.norm("mixer.in_proj.layer_norm_weight", "norm", sizes.hidden),
        at.row(
            "mixer.in_proj.weight",
            [("mixer.in_proj", (sizes.projected, sizes.hidden))],
            **_one_behind_the_other(groups, kinds),
        ),
        at.row(
            "mixer.conv1d_weight",
            [("mixer.conv1d", (sizes.mixed, 1, sizes.width))],
            **_one_behind_the_other(groups, convolution),
        ),
        at.row(
            "mixer.conv1d_bias",
            [("mixer.conv1d", (sizes.mixed,))],
            kind="bias",
            **_one_behind_the_other(groups, convolution),
        ),
        *vectors,
        at.row("mixer.norm.weight", [("mixer.norm", (sizes.inner,))], axis=0),
        at.linear("mixer.out_proj.weight", "mixer.out_proj", (sizes.hidden, sizes.inner), axis=1),
    )


def _one_behind_the_other(groups: int, kinds: dict[str, int]) -> dict[str, Any]:
    """Fields of a Row whose source holds several kinds of rows one behind the other; `kinds`: rows of each that belong
    to one group. Ranks share each kind."""
    starts = accumulate((groups * rows for rows in kinds.values()), initial=0)
    cuts = [Cut(0, start, rows, rows) for start, rows in zip(starts, kinds.values(), strict=False)]
    return {"map": Sections(groups, tuple(cuts)), "axis": 0, "sections": tuple(kinds)}


def _attention(at: Layer, sizes: Attention) -> tuple[Row, ...]:
    """The norm before grouped-query attention and the attention, which the checkpoint calls a mixer, too."""
    return tuple(
        replace(
            row,
            sources=tuple(
                (name.replace("self_attn.", "mixer.").replace("input_layernorm", "norm"), shape)
                for name, shape in row.sources
            ),
        )
        for row in at.attention(sizes)
    )


def _plain_mlp(at: Layer, name: str, source: str, hidden: int, inner: int, suffix: str = "") -> tuple[Row, Row]:
    """An MLP without a gate."""
    return (
        at.linear(f"{name}.linear_fc1.weight{suffix}", f"{source}up_proj", (inner, hidden), axis=0),
        at.linear(f"{name}.linear_fc2.weight{suffix}", f"{source}down_proj", (hidden, inner), axis=1),
    )


def _mlp(at: Layer, hidden: int, inner: int) -> tuple[Row, ...]:
    """The norm before an MLP and the MLP."""
    return at.norm("mlp.linear_fc1.layer_norm_weight", "norm", hidden), *_plain_mlp(at, "mlp", "mixer.", hidden, inner)


def _experts(at: Layer, hf: Fields) -> tuple[Row, ...]:
    """The norm before them, a router with a bias that only chooses, experts and a shared one."""
    hidden, experts, inner = hf["hidden_size"], hf["n_routed_experts"], hf["moe_intermediate_size"]
    shared, bias = hf["moe_shared_expert_intermediate_size"], "e_score_correction_bias"
    return (
        at.norm("pre_mlp_layernorm.weight", "norm", hidden),
        at.row("mlp.router.weight", [("mixer.gate", (experts, hidden))]),
        at.row("mlp.router.expert_bias", [("mixer.gate", (experts,))], kind=bias, dtype="float32"),
        *_plain_mlp(at, "mlp.shared_experts", "mixer.shared_experts.", hidden, shared),
        *_plain_mlp(at, "mlp.experts", "mixer.experts.{expert}.", hidden, inner, suffix="{expert}"),
    )


def engine_table(hf: Fields, *, fused_shared_experts: bool = False) -> Table:
    """Raises SlimxError: only the trainer has the model."""
    raise no_engine(ARCHITECTURE, "SGLang's layout of Mamba-2 layers was never compared, and a publication proves all")
