"""Hybrid decoders of Qwen3-Next's shape: what it, Qwen3.5 and Qwen3.5-MoE share. Most layers are gated delta nets
(Yang et al., 2412.06464), the others attention with an output gate; norms are centred on zero.

The families differ in how their checkpoints store a delta net's input projections (`Projections`), and SGLang serves
each from tensors of its own."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slimx.errors import SlimxError
from slimx.extras.recurrent.delta_nets import SIZES, DeltaNet
from slimx.layout.maps import Cut, Sections
from slimx.layout.table import Group, Row, Table
from slimx.models import decoder, engine_rows
from slimx.models.fields import Fields
from slimx.models.rows import Attention, Layer, embedding, head, tied_copies

_DELTA_NET = "linear_attention"
_KINDS = {_DELTA_NET, "full_attention"}


@dataclass(frozen=True, slots=True)
class Projections:
    """A checkpoint's input projections of a delta net: names and rows, and where each kind of row stands in them."""

    sources: tuple[tuple[str, int], ...]
    cuts: tuple[Cut, ...]
    """Queries, keys, values, output gates, learning rates (beta), decays (alpha): megatron-core's order."""


Store = Callable[[DeltaNet], Projections]


def by_key_head(net: DeltaNet) -> Projections:
    """Qwen3-Next's: all that belongs to one key head stands together."""
    head, share, rates = net.key_head, net.share, net.rates
    each = 2 * head + 2 * share
    starts = ((0, head), (head, head), (2 * head, share), (2 * head + share, share))
    return Projections(
        (("in_proj_qkvz", net.keys * each), ("in_proj_ba", 2 * net.values)),
        (
            *(Cut(0, start, rows, each) for start, rows in starts),
            *(Cut(1, start, rates, 2 * rates) for start in (0, rates)),
        ),
    )


def by_kind(net: DeltaNet) -> Projections:
    """Qwen3.5's: queries, keys and values in one tensor, the others in their own."""
    others = (("z", net.share), ("b", net.rates), ("a", net.rates))
    return Projections(
        (
            ("in_proj_qkv", net.channels),
            *((f"in_proj_{kind}", net.keys * rows) for kind, rows in others),
        ),
        (*net.mixed, *(Cut(number, 0, rows, rows) for number, (_, rows) in enumerate(others, 1))),
    )


Served = Callable[[DeltaNet], dict[str, Projections]]
"""SGLang's input projections of a delta net: what each of its tensors is made of."""


def as_stored(net: DeltaNet) -> dict[str, Projections]:
    """Qwen3-Next's: the checkpoint's own tensors."""
    each = {name: rows // net.keys for name, rows in by_key_head(net).sources}
    return {name: Projections(((name, rows * net.keys),), (Cut(0, 0, rows, rows),)) for name, rows in each.items()}


def merged(net: DeltaNet) -> dict[str, Projections]:
    """Qwen3.5's: of the checkpoint's four tensors the first two in one, and the last two."""
    qkv, z, b, a = by_kind(net).sources
    rates = net.rates
    return {
        "in_proj_qkvz": Projections((qkv, z), (*net.mixed, Cut(1, 0, net.share, net.share))),
        "in_proj_ba": Projections((b, a), (Cut(0, 0, rates, rates), Cut(1, 0, rates, rates))),
    }


def attention_of(hf: Fields) -> Attention:
    """The attention of the other layers."""
    return Attention.of(hf, qk_norm=True, output_gate=True)


def layers_of(hf: Fields, kind: str) -> tuple[int, ...]:
    """Layers of one kind, "linear_attention" or "full_attention", counted from 0."""
    every = hf.get("full_attention_interval") or 4
    kinds = hf.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else _DELTA_NET for layer in range(hf["num_hidden_layers"])
    ]
    if len(kinds) != hf["num_hidden_layers"]:
        raise ValueError(f"layer_types names {len(kinds)} layers of {hf['num_hidden_layers']}")
    return tuple(layer for layer, other in enumerate(kinds) if other == kind)


def transformer_config(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define a model without experts."""
    linear = layers_of(hf, _DELTA_NET)
    return {
        # Files of models with experts alone may leave out the size of an MLP, which they have not.
        **decoder.decoder_fields(
            ChainMap(hf, {"intermediate_size": hf.get("moe_intermediate_size")}), attention_of(hf)
        ),
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in linear) for layer in range(hf["num_hidden_layers"])],
        **{name: hf[name] for name in SIZES.values()},
    }


def moe_fields(hf: Fields) -> dict[str, Any]:
    """Those that experts add."""
    return {
        "num_moe_experts": hf["num_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
    }


def gpt_arguments(hf: Fields) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel besides its TransformerConfig and layer spec."""
    return {**decoder.gpt_arguments(hf), "rotary_percent": decoder.rotary_share(hf, default=0.25)}


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    if scaled := decoder.scaled_otherwise(hf, "default"):
        return scaled
    if odd := set(hf.get("layer_types") or ()) - _KINDS:
        return f"layer_types with {min(odd)}"
    if hf.get("quantization_config"):
        return "quantization_config (fp8 files were never read; take the bf16 ones)"
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        key = "mlp_only_layers" if hf.get("mlp_only_layers") else "decoder_sparse_step"
        return f"{key} {hf[key]} (dense layers among the MoE layers)"
    if (predicting := hf.get("mtp_num_hidden_layers") or 1) != 1:
        return f"mtp_num_hidden_layers {predicting}"
    return decoder.unusual(
        hf,
        ("attention_bias", False),
        ("attn_output_gate", True),
        ("output_gate_type", "swish"),
        ("mamba_ssm_dtype", "float32"),
        ("mtp_use_dedicated_embeddings", False),
        ("hidden_act", "silu"),
    )


def weight_table(hf: Fields, store: Store, frozen: dict[str, tuple[int, ...]] | None = None) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    attention = Layer(layers=layers_of(hf, "full_attention")).attention(attention_of(hf))
    linear = Layer(layers=layers_of(hf, _DELTA_NET))
    experts, layer = hf.get("num_experts") or 0, Layer()
    rows = (
        embedding(hf),
        *attention,
        *_trained(linear, DeltaNet.of(hf), store),
        *(_experts(layer, hf) if experts else layer.dense(hf["hidden_size"], hf["intermediate_size"])),
        *head(hf),
    )
    return Table(
        _plain(rows), layers=hf["num_hidden_layers"], experts=experts, aliases=tied_copies(hf), frozen=frozen or {}
    )


def _trained(at: Layer, net: DeltaNet, store: Store) -> tuple[Row, ...]:
    """The norm before a delta net and the net, as megatron-core's GatedDeltaNet holds it."""
    here, there, stored = "self_attention.", "linear_attn.", store(net)
    inputs = [(there + name, (rows, net.hidden)) for name, rows in stored.sources]
    mixed = [(there + "conv1d", (net.channels, 1, net.width))]
    return (
        at.norm(here + "in_proj.layer_norm_weight", "input_layernorm", net.hidden),
        at.row(
            here + "in_proj.weight",
            inputs,
            map=Sections(net.keys, stored.cuts),
            axis=0,
            sections=("query", "key", "value", "z", "beta", "alpha"),
        ),
        at.row(
            here + "conv1d.weight",
            mixed,
            map=Sections(net.keys, net.mixed),
            axis=0,
            sections=("query", "key", "value"),
        ),
        *(_of_heads(at, here, there, net)),
        at.norm(here + "out_norm.weight", there + "norm", net.value_head),
        at.linear(here + "out_proj.weight", there + "out_proj", (net.hidden, net.value), axis=1),
    )


def _of_heads(at: Layer, here: str, there: str, net: DeltaNet) -> tuple[Row, Row]:
    """Decays and time biases: a number of each value head, under the same names everywhere."""
    decay, bias = (
        Row(f"{at.here}{here}{name}", ((f"{at.there}{there}{name}", (net.values,)),), axis=0, layers=at.layers)
        for name in ("A_log", "dt_bias")
    )
    return decay, bias


def _experts(at: Layer, hf: Fields) -> tuple[Row, ...]:
    """The norm before them, a router, experts, and a shared one behind a gate."""
    hidden, inner, shared = hf["hidden_size"], hf["moe_intermediate_size"], hf["shared_expert_intermediate_size"]
    return (
        *at.moe(hidden, inner, hf["num_experts"]),
        *at.swiglu("mlp.shared_experts", "mlp.shared_expert", hidden, shared),
        at.row("mlp.shared_experts.gate_weight", [("mlp.shared_expert_gate", (1, hidden))]),
    )


def _plain(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    # No fp8 checkpoint of these families was ever read, nor one published.
    return tuple(replace(row, quantised=False) for row in rows)


def prediction_tensors(hf: Fields) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the layer of multi-token prediction, which published files hold and config.json need not
    declare: a layer of gated attention of its own."""
    hidden, at = hf["hidden_size"], Layer("mtp.layers.{layer}.", "mtp.layers.{layer}.")
    rows = (
        Row("fc", (("mtp.fc.weight", (hidden, 2 * hidden)),), stage="first"),
        *(
            Row(name, ((f"mtp.{name}.weight", (hidden,)),), stage="first")
            for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        ),
        *at.attention(attention_of(hf)),
        *(_experts(at, hf) if hf.get("num_experts") else at.dense(hidden, hf["intermediate_size"])),
    )
    return Table(rows, layers=1, experts=hf.get("num_experts") or 0).checkpoint_shapes()


def check_served(hf: Fields, architecture: str, *, fused_shared_experts: bool) -> None:
    """Raises SlimxError for what SGLang 0.5.23 would build otherwise, in every family of this shape."""
    if hf.get("full_attention_interval") is None:
        raise unserved(
            architecture,
            "full_attention_interval",
            "is missing, and SGLang 0.5.23 would serve another model; write it into config.json",
        )
    every, layers = hf["full_attention_interval"], hf["num_hidden_layers"]
    if every > layers:
        raise unserved(architecture, "full_attention_interval", f"is {every}: none of {layers} layers has attention")
    if layers_of(hf, "full_attention") != tuple(range(every - 1, layers, every)):
        raise unserved(
            architecture,
            "layer_types",
            f"is not one layer of attention in {every}, which is all that SGLang 0.5.23 builds",
        )
    if fused_shared_experts:
        raise unserved(
            architecture,
            "shared_expert_intermediate_size",
            "belongs to an expert behind a gate, whose place among the others was never compared; leave "
            "rollout.engines.sglang.enforce_shared_experts_fusion out",
        )


def unserved(architecture: str, key: str, why: str) -> SlimxError:
    """The refusal of an engine for field `key` of a config.json."""
    return SlimxError(f"{architecture}: {key} {why}", code="model.served_field", about=key)


def engine_table(hf: Fields, served: Served, *, embedding: Group = "attention", tied: bool = False) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor. `embedding`: the ranks that share the word embedding; `tied`:
    it is the output layer too."""
    layers, experts = hf["num_hidden_layers"], hf.get("num_experts") or 0
    at, hidden = engine_rows.layer(), hf["hidden_size"]
    attending, linear = (engine_rows.layer(layers_of(hf, kind)) for kind in ("full_attention", _DELTA_NET))
    rows = (
        engine_rows.embedding(hf, embedding),
        *(_beside_the_layer(row) for row in engine_rows.attention(attending, attention_of(hf))),
        *_served(linear, DeltaNet.of(hf), served),
        *(_served_experts(at, hf) if experts else engine_rows.swiglu(at, "mlp", hidden, hf["intermediate_size"])),
        *engine_rows.head(hf, tied=tied),
    )
    return Table(_plain(rows), layers=layers, experts=experts)


def _beside_the_layer(row: Row) -> Row:
    # SGLang's layer of attention has no module of its own for it.
    return replace(row, name=row.name.replace("self_attn.", ""))


def _served_experts(at: Layer, hf: Fields) -> tuple[Row, ...]:
    """A router, experts, and a shared one behind a gate (`Qwen2MoeSparseMoeBlock`)."""
    hidden = hf["hidden_size"]
    return (
        *engine_rows.moe(at, hidden, hf["moe_intermediate_size"], hf["num_experts"]),
        *engine_rows.swiglu(at, "mlp.shared_expert", hidden, hf["shared_expert_intermediate_size"]),
        engine_rows.same(at, "mlp.shared_expert_gate", 1, hidden),
    )


def _served(at: Layer, net: DeltaNet, served: Served) -> tuple[Row, ...]:
    """The norms around a delta net and the net (`Qwen3GatedDeltaNet`, `Qwen3_5GatedDeltaNet`)."""
    there = "linear_attn."
    split: dict[str, Any] = {"axis": 0, "group": "attention"}
    each = [
        at.row(
            f"{there}{name}.weight",
            [(there + source, (rows, net.hidden)) for source, rows in made.sources],
            map=Sections(net.keys, made.cuts),
            **split,
        )
        for name, made in served(net).items()
    ]
    conv = [(there + "conv1d", (net.channels, 1, net.width))]
    decay, bias = _of_heads(at, there, there, net)
    return (
        engine_rows.same(at, "input_layernorm", net.hidden),
        *each,
        at.row(there + "conv1d.weight", conv, map=Sections(net.keys, net.mixed), **split),
        replace(decay, dtype="float32", group="attention"),
        replace(bias, group="attention"),
        engine_rows.same(at, there + "norm", net.value_head),
        engine_rows.same(at, there + "out_proj", net.hidden, net.value, axis=1, group="attention"),
        engine_rows.same(at, "post_attention_layernorm", net.hidden),
    )
