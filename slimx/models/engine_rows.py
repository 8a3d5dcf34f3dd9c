"""Rows of engines' weight tables that several families use. Each table row relates a parameter, as SGLang 0.5.23 names
and fuses it, to the checkpoint tensors that it contains."""

from __future__ import annotations

from collections.abc import Collection
from typing import Unpack

from slimx.errors import SlimxError
from slimx.layout.maps import Blocks, Concat
from slimx.layout.table import Group, Row, Sources, padded_vocabulary
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention, Layer, RowOptions

LAYER = "model.layers.{layer}."


def no_engine(architecture: str, reason: str) -> SlimxError:
    """Returns the error for an attempt to publish weights of the family `architecture`, which engines cannot serve.
    `reason`: reason why engines cannot serve the family, as a clause."""
    return SlimxError(
        f"{architecture} models cannot be published to engines, because {reason}; train the model without engines "
        "(algorithm.name=sft)",
        code="model.no_engine",
        about=architecture,
    )


def layer(layers: Collection[int] | None = None) -> Layer:
    """Returns a `Layer`, which creates the weight-table rows of decoder layers, with the prefix model.layers.N. that
    SGLang and checkpoints share. `layers`: indices of the layers that have these parameters; None: all."""
    return Layer(LAYER, LAYER, layers=layers)


def same(decoder_layer: Layer, name: str, *shape: int, **options: Unpack[RowOptions]) -> Row:
    """Returns a weight-table row for the parameter `name`.weight, which has the same name in SGLang and in the
    checkpoint. `shape`: shape of the tensor; `options`: further fields of `Row`."""
    return decoder_layer.row(f"{name}.weight", [(name, shape)], **options)


def attention(decoder_layer: Layer, sizes: Attention, group: Group = "attention") -> tuple[Row, ...]:
    """Returns the weight-table rows of grouped-query attention (SGLang's `QKVParallelLinear` and `RowParallelLinear`)
    with the norms before and after it. `group`: group of ranks that split attention; "tensor" if SGLang's model does
    not support DP-attention, in which case all ranks split it (`get_parallel().tp_size`)."""
    heads = Blocks((sizes.heads, sizes.groups, sizes.groups))
    matrices = [(name, (count, sizes.hidden)) for name, count in sizes.qkv]
    fused = decoder_layer.row("self_attn.qkv_proj.weight", matrices, map=heads, axis=0, group=group, quantized=True)
    rows = [same(decoder_layer, "input_layernorm", sizes.hidden), fused]
    if sizes.qkv_bias:
        vectors = [(name, (count,)) for name, count in sizes.qkv]
        rows.append(decoder_layer.row("self_attn.qkv_proj.bias", vectors, kind="bias", map=heads, axis=0, group=group))
    if sizes.qk_norm:
        rows += [same(decoder_layer, f"self_attn.{kind}_norm", sizes.head) for kind in "qk"]
    if sizes.projection_norm:
        for kind, count in (("q", sizes.heads), ("k", sizes.groups)):
            size = count * sizes.head
            rows.append(same(decoder_layer, f"self_attn.{kind}_norm", size, map=Blocks((count,)), axis=0, group=group))
    shape = sizes.hidden, sizes.heads * sizes.head
    rows.append(same(decoder_layer, "self_attn.o_proj", *shape, axis=1, group=group, quantized=True))
    if sizes.output_bias:
        rows.append(decoder_layer.row("self_attn.o_proj.bias", [("self_attn.o_proj", (sizes.hidden,))], kind="bias"))
    return *rows, same(decoder_layer, "post_attention_layernorm", sizes.hidden)


def swiglu(decoder_layer: Layer, name: str, hidden: int, inner: int) -> tuple[Row, Row]:
    """Returns the weight-table rows of the gated MLP `name`: gate and up projections fused
    (`MergedColumnParallelLinear`), and down projection. `inner`: intermediate size."""
    both = [(f"{name}.{kind}_proj", (inner, hidden)) for kind in ("gate", "up")]
    return (
        decoder_layer.row(f"{name}.gate_up_proj.weight", both, map=Concat(), axis=0, quantized=True),
        same(decoder_layer, f"{name}.down_proj", hidden, inner, axis=1, quantized=True),
    )


def moe(
    decoder_layer: Layer,
    hidden: int,
    inner: int,
    experts: int,
    *,
    shared: int = 0,
    fused: bool = False,
    selection: bool = False,
    gate_dtype: str | None = None,
) -> tuple[Row, ...]:
    """Returns the weight-table rows of an MoE layer: the router, and all experts fused into two parameters
    (`FusedMoE`).

    `inner`: intermediate size of a routed expert. `shared`: total intermediate size of the shared experts. `fused`:
    True if the shared experts follow the routed ones in the same parameters. `selection`: True if the router has a bias
    that is used only to select experts. `gate_dtype`: dtype of the router's weight; None: the model's dtype."""
    gate = "mlp.gate"
    rows = [same(decoder_layer, gate, experts, hidden, dtype=gate_dtype)]
    if selection:
        bias = "e_score_correction_bias"
        rows.append(decoder_layer.row(f"{gate}.{bias}", [(gate, (experts,))], kind=bias, dtype="float32"))

    def stacked(name: str, kinds: tuple[str, ...], shape: tuple[int, int], **options: Unpack[RowOptions]) -> Row:
        routed = [(f"mlp.experts.{{expert}}.{kind}_proj", shape) for kind in kinds]
        if fused:
            module = f"{decoder_layer.source_prefix}mlp.shared_experts"
            sources: Sources = tuple((f"{module}.{kind}_proj.weight", shape) for kind in kinds)
            options["appended"] = (sources,)
        options["quantized"] = True
        return decoder_layer.row(f"mlp.experts.{name}", routed, **options)

    rows.append(stacked("w13_weight", ("gate", "up"), (inner, hidden), map=Concat(), axis=0))
    rows.append(stacked("w2_weight", ("down",), (hidden, inner), axis=1))
    if shared and not fused:
        rows += swiglu(decoder_layer, "mlp.shared_experts", hidden, shared)
    return tuple(rows)


def embedding(hf: HfConfig, group: Group = "attention") -> Row:
    """Returns the weight-table row of the word embedding (`VocabParallelEmbedding`). `group`: group of ranks that split
    the embedding, as in `attention`."""
    name = "model.embed_tokens.weight"
    return padded_vocabulary(name, hf["vocab_size"], hf["hidden_size"], stage="first", group=group)


def head(hf: HfConfig, *, tied: bool = False) -> tuple[Row, ...]:
    """Returns the weight-table rows of the final norm and the output layer (`ParallelLMHead`). `tied`: True if SGLang
    uses the embedding as the output layer; the table then has no row for the output layer."""
    norm = Row("model.norm.weight", (("model.norm.weight", (hf["hidden_size"],)),), stage="last")
    output = padded_vocabulary("lm_head.weight", hf["vocab_size"], hf["hidden_size"], stage="last", group="tensor")
    return (norm,) if tied else (norm, output)
