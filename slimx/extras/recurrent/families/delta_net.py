"""Common part of the families Qwen3-Next, Qwen3.5 and Qwen3.5-MoE. Most layers are gated delta nets (Yang et al.,
2412.06464), the others attention with an output gate. Norms are zero-centered.

The families differ in how checkpoints store a delta net's input projections (`Projections`), and in how SGLang stores
them (`Served`).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from slimx.errors import SlimxError
from slimx.extras.recurrent.delta_nets import SIZES, DeltaNet
from slimx.json_types import Json
from slimx.layout.maps import Cut, Sections
from slimx.layout.table import Group, Row, Table
from slimx.models import decoder, engine_rows
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention, Layer, embedding, head, tied_copies

_DELTA_NET = "linear_attention"
_KINDS = {_DELTA_NET, "full_attention"}


@dataclass(frozen=True, slots=True)
class Projections:
    """Storage of a delta net's input projections in one or several tensors. `sources`: name and number of rows of
    each tensor."""

    sources: tuple[tuple[str, int], ...]
    cuts: tuple[Cut, ...]
    """Locations of each kind of row in `sources`, in megatron-core's order: queries, keys, values, output gates,
    learning rates (beta), decays (alpha)."""


Store = Callable[[DeltaNet], Projections]


def by_key_head(net: DeltaNet) -> Projections:
    """Returns the layout of the input projections in Qwen3-Next's checkpoints, where all rows that belong to one key
    head are adjacent."""
    head = net.key_head
    values = net.value_rows
    rates = net.rates
    period = 2 * head + 2 * values
    return Projections(
        (("in_proj_qkvz", net.keys * period), ("in_proj_ba", 2 * net.values)),
        (
            Cut(0, 0, head, period),
            Cut(0, head, head, period),
            Cut(0, 2 * head, values, period),
            Cut(0, 2 * head + values, values, period),
            Cut(1, 0, rates, 2 * rates),
            Cut(1, rates, rates, 2 * rates),
        ),
    )


def by_kind(net: DeltaNet) -> Projections:
    """Returns the layout of the input projections in Qwen3.5's checkpoints: one tensor for queries, keys and values,
    and one each for output gates, learning rates and decays."""
    return Projections(
        (
            ("in_proj_qkv", net.channels),
            ("in_proj_z", net.keys * net.value_rows),
            ("in_proj_b", net.keys * net.rates),
            ("in_proj_a", net.keys * net.rates),
        ),
        (
            *net.mixed,
            Cut(1, 0, net.value_rows, net.value_rows),
            Cut(2, 0, net.rates, net.rates),
            Cut(3, 0, net.rates, net.rates),
        ),
    )


Served = Callable[[DeltaNet], dict[str, Projections]]
"""Function that returns {SGLang parameter name: layout} for the parameters that contain a delta net's input
projections. A layout lists the checkpoint tensors in the parameter and the order of their rows."""


def as_stored(net: DeltaNet) -> dict[str, Projections]:
    """Returns SGLang's parameters for Qwen3-Next's input projections, which store the checkpoint's tensors
    unchanged."""
    served = {}
    for name, rows in by_key_head(net).sources:
        head_rows = rows // net.keys
        served[name] = Projections(((name, rows),), (Cut(0, 0, head_rows, head_rows),))
    return served


def merged(net: DeltaNet) -> dict[str, Projections]:
    """Returns SGLang's parameters for Qwen3.5's input projections: one contains the checkpoint's in_proj_qkv and
    in_proj_z, the other in_proj_b and in_proj_a."""
    qkv, z, b, a = by_kind(net).sources
    rates = net.rates
    return {
        "in_proj_qkvz": Projections((qkv, z), (*net.mixed, Cut(1, 0, net.value_rows, net.value_rows))),
        "in_proj_ba": Projections((b, a), (Cut(0, 0, rates, rates), Cut(1, 0, rates, rates))),
    }


def attention_of(hf: HfConfig) -> Attention:
    """Returns the sizes of the attention layers in the model that config.json `hf` describes."""
    return Attention.of(hf, qk_norm=True, output_gate=True)


def layers_of(hf: HfConfig, kind: str) -> tuple[int, ...]:
    """Returns the indices, from 0, of the layers of kind `kind`: "linear_attention" (delta nets) or
    "full_attention"."""
    count = hf["num_hidden_layers"]
    interval = hf.get("full_attention_interval") or 4
    kinds = hf.get("layer_types")
    if not kinds:
        kinds = [_DELTA_NET] * count
        kinds[interval - 1 :: interval] = ["full_attention"] * (count // interval)
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
    return tuple(layer for layer, layer_kind in enumerate(kinds) if layer_kind == kind)


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism, dtype and
    experts (`moe_fields`)."""
    linear = layers_of(hf, _DELTA_NET)
    # If all layers have experts, config.json may omit intermediate_size.
    fields = ChainMap(cast(Json, hf), {"intermediate_size": hf.get("moe_intermediate_size")})
    return {
        **decoder.decoder_fields(fields, attention_of(hf)),
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in linear) for layer in range(hf["num_hidden_layers"])],
        **{name: hf[name] for name in SIZES.values()},
    }


def moe_fields(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's TransformerConfig that define a model's experts and router."""
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


def gpt_arguments(hf: HfConfig) -> dict[str, Any]:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return {**decoder.gpt_arguments(hf), "rotary_percent": decoder.rotary_fraction(hf, default=0.25)}


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    scaled = decoder.scaled_otherwise(hf, "default")
    if scaled:
        return scaled
    odd = set(hf.get("layer_types") or ()) - _KINDS
    if odd:
        return f"layer_types with {min(odd)}"
    if hf.get("quantization_config"):
        return "quantization_config (fp8 files were never tested; use the bf16 checkpoint)"
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        key = "mlp_only_layers" if hf.get("mlp_only_layers") else "decoder_sparse_step"
        return f"{key} {hf[key]} (dense layers among the MoE layers)"
    predicting = hf.get("mtp_num_hidden_layers") or 1
    if predicting != 1:
        return f"mtp_num_hidden_layers {predicting}"
    return decoder.unsupported_field(
        hf,
        ("attention_bias", False),
        ("attn_output_gate", True),
        ("output_gate_type", "swish"),
        ("mamba_ssm_dtype", "float32"),
        ("mtp_use_dedicated_embeddings", False),
        ("hidden_act", "silu"),
    )


def weight_table(hf: HfConfig, store: Store, frozen: Mapping[str, tuple[int, ...]] | None = None) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `store`: function that returns the checkpoint's layout of a delta net's input projections, such as
    `by_kind`; `frozen`: names and shapes of checkpoint tensors that are not trained, but copied to exports."""
    attention = Layer(layers=layers_of(hf, "full_attention")).attention(attention_of(hf))
    linear = Layer(layers=layers_of(hf, _DELTA_NET))
    experts = hf.get("num_experts") or 0
    layer = Layer()
    rows = (
        embedding(hf),
        *attention,
        *_trained(linear, DeltaNet.of(hf), store),
        *(_experts(layer, hf) if experts else layer.dense(hf["hidden_size"], hf["intermediate_size"])),
        *head(hf),
    )
    return Table(
        rows,
        layers=hf["num_hidden_layers"],
        experts=experts,
        aliases=tied_copies(hf),
        frozen=frozen or {},
    )


def _trained(layer: Layer, net: DeltaNet, store: Store) -> tuple[Row, ...]:
    """Returns the weight-table rows of a delta net as megatron-core's GatedDeltaNet stores it, and of the norm before
    it. `store`: as in `weight_table`."""
    prefix = "self_attention."
    source_prefix = "linear_attn."
    stored = store(net)
    inputs = [(source_prefix + name, (rows, net.hidden)) for name, rows in stored.sources]
    mixed = [(source_prefix + "conv1d", (net.channels, 1, net.width))]
    return (
        layer.norm(prefix + "in_proj.layer_norm_weight", "input_layernorm", net.hidden),
        layer.row(
            prefix + "in_proj.weight",
            inputs,
            map=Sections(net.keys, stored.cuts),
            axis=0,
            sections=("query", "key", "value", "z", "beta", "alpha"),
            quantized=True,
        ),
        layer.row(
            prefix + "conv1d.weight",
            mixed,
            map=Sections(net.keys, net.mixed),
            axis=0,
            sections=("query", "key", "value"),
        ),
        *_head_vectors(layer, prefix, source_prefix, net),
        layer.norm(prefix + "out_norm.weight", source_prefix + "norm", net.value_head),
        layer.linear(prefix + "out_proj.weight", source_prefix + "out_proj", (net.hidden, net.value), axis=1),
    )


def _head_vectors(layer: Layer, prefix: str, source_prefix: str, net: DeltaNet) -> tuple[Row, Row]:
    """Returns the weight-table rows of A_log and dt_bias, which have one element per value head. megatron-core, SGLang
    and checkpoints use these names after a delta net's prefix, which is `prefix` in the model and `source_prefix` in
    checkpoints."""

    def row(name: str) -> Row:
        source = f"{layer.source_prefix}{source_prefix}{name}", (net.values,)
        return Row(f"{layer.prefix}{prefix}{name}", (source,), axis=0, layers=layer.layers)

    return row("A_log"), row("dt_bias")


def _experts(layer: Layer, hf: HfConfig) -> tuple[Row, ...]:
    """Returns the weight-table rows of an MoE layer: the router, the routed experts, the gated shared expert, and the
    norm before them."""
    hidden = hf["hidden_size"]
    inner = hf["moe_intermediate_size"]
    shared = hf["shared_expert_intermediate_size"]
    return (
        *layer.moe(hidden, inner, hf["num_experts"]),
        *layer.swiglu("mlp.shared_experts", "mlp.shared_expert", hidden, shared),
        layer.row("mlp.shared_experts.gate_weight", [("mlp.shared_expert_gate", (1, hidden))]),
    )


def prediction_tensors(hf: HfConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the names and shapes of the checkpoint tensors of the multi-token prediction layer, which is a layer with
    gated attention.

    Published checkpoints contain this layer even if config.json does not declare it."""
    hidden = hf["hidden_size"]
    layer = Layer("mtp.layers.{layer}.", "mtp.layers.{layer}.")
    rows = (
        Row("fc", (("mtp.fc.weight", (hidden, 2 * hidden)),), stage="first"),
        *(
            Row(name, ((f"mtp.{name}.weight", (hidden,)),), stage="first")
            for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        ),
        *layer.attention(attention_of(hf)),
        *(_experts(layer, hf) if hf.get("num_experts") else layer.dense(hidden, hf["intermediate_size"])),
    )
    return Table(rows, layers=1, experts=hf.get("num_experts") or 0).checkpoint_shapes()


def check_served(hf: HfConfig, architecture: str, *, fused_shared_experts: bool) -> None:
    """Raises SlimxError if SGLang 0.5.23 would build a different model from config.json `hf`; checks the fields that
    Qwen3-Next and Qwen3.5 have in common. `architecture`: the model's architecture, for the error."""
    if hf.get("full_attention_interval") is None:
        raise unserved(
            architecture,
            "full_attention_interval",
            "is missing from config.json, so SGLang 0.5.23 would serve a different model; set "
            "full_attention_interval as in the published config.json",
        )
    interval = hf["full_attention_interval"]
    layers = hf["num_hidden_layers"]
    if interval > layers:
        raise unserved(
            architecture,
            "full_attention_interval",
            f"is {interval} in config.json, so none of the {layers} layers has full attention; restore config.json "
            "from the checkpoint's source",
        )
    if layers_of(hf, "full_attention") != tuple(range(interval - 1, layers, interval)):
        raise unserved(
            architecture,
            "layer_types",
            f"in config.json does not have one full-attention layer in every {interval} layers, the only pattern that "
            "SGLang 0.5.23 builds; train the model without engines",
        )
    if fused_shared_experts:
        raise unserved(
            architecture,
            "shared_expert_intermediate_size",
            "in config.json declares a gated shared expert, whose fusion with the routed experts was never tested; "
            "remove rollout.engines.sglang.enforce_shared_experts_fusion",
        )


def unserved(architecture: str, key: str, problem: str) -> SlimxError:
    """Returns the error for a model that SGLang cannot serve because of config.json's field `key`. `problem`: rest of
    the sentence that starts with `key`."""
    return SlimxError(f"{architecture}: {key} {problem}", code="model.served_field", about=key)


def engine_table(hf: HfConfig, served: Served, *, embedding: Group = "attention", tied: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model. `served`: function
    that returns SGLang's parameters for a delta net's input projections; `embedding`: group of ranks that split the
    word embedding; `tied`: True if the embedding is also the output layer."""
    layers = hf["num_hidden_layers"]
    hidden = hf["hidden_size"]
    experts = hf.get("num_experts") or 0
    layer = engine_rows.layer()
    attention = engine_rows.layer(layers_of(hf, "full_attention"))
    linear = engine_rows.layer(layers_of(hf, _DELTA_NET))
    rows = (
        engine_rows.embedding(hf, embedding),
        *(_without_attention_module(row) for row in engine_rows.attention(attention, attention_of(hf))),
        *_served(linear, DeltaNet.of(hf), served),
        *(_served_experts(layer, hf) if experts else engine_rows.swiglu(layer, "mlp", hidden, hf["intermediate_size"])),
        *engine_rows.head(hf, tied=tied),
    )
    return Table(rows, layers=layers, experts=experts)


def _without_attention_module(row: Row) -> Row:
    # SGLang stores attention's parameters in the decoder layer itself, not in a submodule self_attn.
    return replace(row, name=row.name.replace("self_attn.", ""))


def _served_experts(layer: Layer, hf: HfConfig) -> tuple[Row, ...]:
    """Returns the weight-table rows of an MoE layer in SGLang (`Qwen2MoeSparseMoeBlock`): the router, the routed
    experts and the gated shared expert."""
    hidden = hf["hidden_size"]
    return (
        *engine_rows.moe(layer, hidden, hf["moe_intermediate_size"], hf["num_experts"]),
        *engine_rows.swiglu(layer, "mlp.shared_expert", hidden, hf["shared_expert_intermediate_size"]),
        engine_rows.same(layer, "mlp.shared_expert_gate", 1, hidden),
    )


def _served(layer: Layer, net: DeltaNet, served: Served) -> tuple[Row, ...]:
    """Returns the weight-table rows of a delta net in SGLang (`Qwen3GatedDeltaNet`, `Qwen3_5GatedDeltaNet`), and of the
    norms before and after it. `served`: function that returns SGLang's parameters for the input projections."""
    source_prefix = "linear_attn."
    split: dict[str, Any] = {"axis": 0, "group": "attention"}
    projections = []
    for name, sources in served(net).items():
        tensors = [(source_prefix + source, (rows, net.hidden)) for source, rows in sources.sources]
        projections.append(
            layer.row(
                f"{source_prefix}{name}.weight",
                tensors,
                map=Sections(net.keys, sources.cuts),
                quantized=name == "in_proj_qkvz",  # the rates are too narrow for blocks
                **split,
            )
        )
    conv = [(source_prefix + "conv1d", (net.channels, 1, net.width))]
    decay, bias = _head_vectors(layer, source_prefix, source_prefix, net)
    return (
        engine_rows.same(layer, "input_layernorm", net.hidden),
        *projections,
        layer.row(source_prefix + "conv1d.weight", conv, map=Sections(net.keys, net.mixed), **split),
        replace(decay, dtype="float32", group="attention"),
        replace(bias, group="attention"),
        engine_rows.same(layer, source_prefix + "norm", net.value_head),
        engine_rows.same(
            layer, source_prefix + "out_proj", net.hidden, net.value, axis=1, group="attention", quantized=True
        ),
        engine_rows.same(layer, "post_attention_layernorm", net.hidden),
    )
