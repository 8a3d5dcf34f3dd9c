"""Rows of weight tables that families share, as SGLang 0.5.23 names and fuses the tensors."""

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
    """Returns the error for publishing a train-only family to engines, with the reason."""
    return SlimxError(
        f"{architecture} cannot be published to engines: {reason}; train it without them (algorithm.name=sft)",
        code="model.no_engine",
        about=architecture,
    )


def layer(layers: Collection[int] | None = None) -> Layer:
    """Returns a writer of decoder layer rows, which SGLang names as Hugging Face does."""
    return Layer(LAYER, LAYER, layers=layers)


def same(decoder_layer: Layer, name: str, *shape: int, **options: Unpack[RowOptions]) -> Row:
    """Returns a row `name`.weight that has the checkpoint's name."""
    return decoder_layer.row(f"{name}.weight", [(name, shape)], **options)


def attention(decoder_layer: Layer, sizes: Attention, group: Group = "attention") -> tuple[Row, ...]:
    """Returns rows of grouped-query attention with the norms before and after it (`QKVParallelLinear`,
    `RowParallelLinear`). `group`: "tensor" if SGLang's model does not support DP-attention and splits it over all ranks
    (`get_parallel().tp_size`)."""
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
    """Returns rows of a gated MLP: gate and up fused (`MergedColumnParallelLinear`), and down."""
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
    """Returns rows of a router and of all experts in two tensors (`FusedMoE`).

    `shared`: total inner size of the shared experts, which follow the routed ones in the same tensors if `fused`;
    `selection`: the router has a bias used for selection only; `gate_dtype`: the router weight's dtype if it is not the
    model's."""
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
    """Returns the row of the word embedding (`VocabParallelEmbedding`). `group`: as in `attention`."""
    name = "model.embed_tokens.weight"
    return padded_vocabulary(name, hf["vocab_size"], hf["hidden_size"], stage="first", group=group)


def head(hf: HfConfig, *, tied: bool = False) -> tuple[Row, ...]:
    """Returns rows of the last norm and the output layer (`ParallelLMHead`). `tied`: SGLang reuses the embedding and
    has no second copy."""
    norm = Row("model.norm.weight", (("model.norm.weight", (hf["hidden_size"],)),), stage="last")
    output = padded_vocabulary("lm_head.weight", hf["vocab_size"], hf["hidden_size"], stage="last", group="tensor")
    return (norm,) if tied else (norm, output)
