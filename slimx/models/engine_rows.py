"""The rows that families share, as SGLang 0.5.23 names and fuses the tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from slimx.errors import SlimxError
from slimx.layout.maps import Blocks, Concat
from slimx.layout.table import Group, Row, Sources, padded_vocabulary
from slimx.models.rows import Attention, Layer

LAYER = "model.layers.{layer}."


def no_engine(architecture: str, why: str) -> SlimxError:
    """The refusal of engines for a family that is trained only, with the reason."""
    return SlimxError(
        f"{architecture} cannot be published to engines: {why}; train it without them (algorithm.name=sft)",
        code="model.no_engine",
        about=architecture,
    )


def layer(layers: Collection[int] | None = None) -> Layer:
    """Rows of decoder layers, which SGLang names as Hugging Face does."""
    return Layer(LAYER, LAYER, layers=layers)


def same(at: Layer, name: str, *shape: int, **how: Any) -> Row:
    """A tensor `name`.weight that has the checkpoint's name."""
    return at.row(f"{name}.weight", [(name, shape)], **how)


def attention(at: Layer, sizes: Attention, group: Group = "attention") -> tuple[Row, ...]:
    """Grouped-query attention with the norms before and after it (`QKVParallelLinear`, `RowParallelLinear`). `group`:
    "tensor" where SGLang's model knows no DP-attention and splits it over all ranks (`get_parallel().tp_size`)."""
    heads = Blocks((sizes.heads, sizes.groups, sizes.groups))
    matrices = [(name, (count, sizes.hidden)) for name, count in sizes.qkv]
    fused = at.row("self_attn.qkv_proj.weight", matrices, map=heads, axis=0, group=group, quantised=True)
    rows = [same(at, "input_layernorm", sizes.hidden), fused]
    if sizes.qkv_bias:
        vectors = [(name, (count,)) for name, count in sizes.qkv]
        rows.append(at.row("self_attn.qkv_proj.bias", vectors, kind="bias", map=heads, axis=0, group=group))
    if sizes.qk_norm:
        rows += [same(at, f"self_attn.{kind}_norm", sizes.head) for kind in "qk"]
    if sizes.projection_norm:
        for kind, count in (("q", sizes.heads), ("k", sizes.groups)):
            how = {"map": Blocks((count,)), "axis": 0, "group": group}
            rows.append(same(at, f"self_attn.{kind}_norm", count * sizes.head, **how))
    shape = sizes.hidden, sizes.heads * sizes.head
    rows.append(same(at, "self_attn.o_proj", *shape, axis=1, group=group, quantised=True))
    if sizes.output_bias:
        rows.append(at.row("self_attn.o_proj.bias", [("self_attn.o_proj", (sizes.hidden,))], kind="bias"))
    return *rows, same(at, "post_attention_layernorm", sizes.hidden)


def swiglu(at: Layer, name: str, hidden: int, inner: int) -> tuple[Row, Row]:
    """A gated MLP: gate and up in one tensor (`MergedColumnParallelLinear`), and down."""
    both = [(f"{name}.{kind}_proj", (inner, hidden)) for kind in ("gate", "up")]
    return (
        at.row(f"{name}.gate_up_proj.weight", both, map=Concat(), axis=0, quantised=True),
        same(at, f"{name}.down_proj", hidden, inner, axis=1, quantised=True),
    )


def moe(
    at: Layer,
    hidden: int,
    inner: int,
    experts: int,
    *,
    shared: int = 0,
    fused: bool = False,
    selection: bool = False,
    gate_dtype: str | None = None,
) -> tuple[Row, ...]:
    """A router and all experts in two tensors (`FusedMoE`). `shared`: inner size of the shared experts together, which
    stand after the others in the same tensors if they are `fused`; `selection`: with a bias that only chooses;
    `gate_dtype`: of the router's weight, where that is not the model's."""
    gate = "mlp.gate"
    rows = [same(at, gate, experts, hidden, dtype=gate_dtype)]
    if selection:
        bias = "e_score_correction_bias"
        rows.append(at.row(f"{gate}.{bias}", [(gate, (experts,))], kind=bias, dtype="float32"))

    def stacked(name: str, kinds: tuple[str, ...], shape: tuple[int, int], **how: Any) -> Row:
        of = [(f"mlp.experts.{{expert}}.{kind}_proj", shape) for kind in kinds]
        behind: Sources = tuple((f"{at.there}mlp.shared_experts.{kind}_proj.weight", shape) for kind in kinds)
        return at.row(f"mlp.experts.{name}", of, quantised=True, appended=(behind,) if fused else (), **how)

    rows.append(stacked("w13_weight", ("gate", "up"), (inner, hidden), map=Concat(), axis=0))
    rows.append(stacked("w2_weight", ("down",), (hidden, inner), axis=1))
    return *rows, *(swiglu(at, "mlp.shared_experts", hidden, shared) if shared and not fused else ())


def embedding(hf: dict[str, Any], group: Group = "attention") -> Row:
    """The word embedding (`VocabParallelEmbedding`); `group` as of `attention`."""
    name = "model.embed_tokens.weight"
    return padded_vocabulary(name, hf["vocab_size"], hf["hidden_size"], stage="first", group=group)


def head(hf: dict[str, Any], *, tied: bool = False) -> tuple[Row, ...]:
    """The last norm and the output layer (`ParallelLMHead`); `tied`: SGLang uses the embedding itself, without a second
    copy."""
    norm = Row("model.norm.weight", (("model.norm.weight", (hf["hidden_size"],)),), stage="last")
    output = padded_vocabulary("lm_head.weight", hf["vocab_size"], hf["hidden_size"], stage="last", group="tensor")
    return (norm,) if tied else (norm, output)
