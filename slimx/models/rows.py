"""Rows of weight tables that families share, as megatron-core names the tensors; a family's file selects those that its
model has.

A row's name is Megatron's, its sources are Hugging Face's. `engine_rows` has SGLang's names of the same tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self, TypedDict, Unpack

from slimx.layout.maps import Concat, IndexMap, InterleaveQKV
from slimx.layout.table import Group, Row, Sources, Stage
from slimx.models.fields import HfConfig

Named = Iterable[tuple[str, tuple[int, ...]]]
"""Names of checkpoint tensors, without prefix and kind, and their shapes."""


class RowOptions(TypedDict, total=False):
    """Optional fields of a `Row` that do not depend on its layer."""

    map: IndexMap
    axis: int | None
    group: Group | None
    dtype: str | None
    quantized: bool
    sections: tuple[str, ...]
    appended: tuple[Sources, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Sizes and optional tensors of grouped-query attention."""

    hidden: int
    heads: int
    groups: int
    """Key and value heads."""
    head: int
    """Dimension of each head."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """True if each head of query and key is normalized, with one weight for all heads."""
    output_gate: bool = False
    """True if each query head has a gate; the attention output is multiplied by its sigmoid."""
    projection_norm: bool = False
    """True if the query is normalized over all its heads together, and so is the key. The norms are split over ranks as
    the heads are."""

    @classmethod
    def of(cls, hf: HfConfig, **optional: bool) -> Self:
        """Returns the sizes in config.json, under the names that nearly all families use."""
        hidden = hf["hidden_size"]
        heads = hf["num_attention_heads"]
        groups = hf.get("num_key_value_heads")
        head = hf.get("head_dim")
        return cls(
            hidden=hidden,
            heads=heads,
            groups=heads if groups is None else groups,
            head=hidden // heads if head is None else head,
            **optional,
        )

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} attention heads cannot share {self.groups} key and value heads")

    @property
    def qkv(self) -> tuple[tuple[str, int], ...]:
        """The checkpoint's query, key and value projections with their numbers of rows."""
        rows = (self.heads * self.head * (1 + self.output_gate), *(self.groups * self.head,) * 2)
        return tuple((f"self_attn.{kind}_proj", count) for kind, count in zip("qkv", rows, strict=True))


@dataclass(frozen=True, slots=True)
class Layer:
    """Creates the rows of one kind of layer, with its prefixes and pipeline stage."""

    prefix: str = "decoder.layers.{layer}."
    source_prefix: str = "model.layers.{layer}."
    stage: Stage = "layer"
    layers: Collection[int] | None = None
    """Layers that have the rows; None: all."""

    def row(self, name: str, sources: Named, *, kind: str = "weight", **options: Unpack[RowOptions]) -> Row:
        """Returns a row `name` whose sources are the tensors `kind` of the modules named in `sources`. `options`:
        fields of `Row`."""
        full = tuple((f"{self.source_prefix}{source}.{kind}", shape) for source, shape in sources)
        return Row(self.prefix + name, full, stage=self.stage, layers=self.layers, **options)

    def norm(self, name: str, source: str, size: int) -> Row:
        """Returns the row of a vector that every rank holds in full."""
        return self.row(name, [(source, (size,))])

    def linear(self, name: str, source: str, shape: tuple[int, int], axis: int | None = None) -> Row:
        """Returns the row of a matrix that fp8 checkpoints hold in blocks."""
        return self.row(name, [(source, shape)], axis=axis, quantized=True)

    def swiglu(self, name: str, source: str, hidden: int, inner: int, suffix: str = "") -> tuple[Row, Row]:
        """Returns rows of a gated MLP: gate and up fused, and down. For experts `source` has `{expert}`, and `suffix`
        is it."""
        gate, up, down = (f"{source}.{kind}_proj" for kind in ("gate", "up", "down"))
        both = [(gate, (inner, hidden)), (up, (inner, hidden))]
        return (
            self.row(f"{name}.linear_fc1.weight{suffix}", both, map=Concat(), axis=0, quantized=True),
            self.linear(f"{name}.linear_fc2.weight{suffix}", down, (hidden, inner), axis=1),
        )

    def attention(self, sizes: Attention) -> tuple[Row, ...]:
        """Returns rows of grouped-query attention and the norm before it."""
        heads = InterleaveQKV(sizes.heads, sizes.groups, sizes.head, gated=sizes.output_gate)
        matrices = [(name, (count, sizes.hidden)) for name, count in sizes.qkv]
        module = "self_attention."
        rows = [
            self.norm(module + "linear_qkv.layer_norm_weight", "input_layernorm", sizes.hidden),
            self.row(module + "linear_qkv.weight", matrices, map=heads, axis=0, quantized=True),
        ]
        if sizes.qkv_bias:
            vectors = [(name, (count,)) for name, count in sizes.qkv]
            rows.append(self.row(module + "linear_qkv.bias", vectors, kind="bias", map=heads, axis=0))
        if sizes.qk_norm:
            for kind in "qk":
                rows.append(self.norm(f"{module}{kind}_layernorm.weight", f"self_attn.{kind}_norm", sizes.head))
        if sizes.projection_norm:
            for kind, (_, width) in zip("qk", sizes.qkv, strict=False):
                source = f"self_attn.{kind}_norm"
                rows.append(self.row(f"{module}{kind}_layernorm.weight", [(source, (width,))], axis=0))
        shape = (sizes.hidden, sizes.heads * sizes.head)
        rows.append(self.linear(module + "linear_proj.weight", "self_attn.o_proj", shape, axis=1))
        if sizes.output_bias:
            rows.append(self.row(module + "linear_proj.bias", [("self_attn.o_proj", (sizes.hidden,))], kind="bias"))
        return tuple(rows)

    def dense(self, hidden: int, inner: int) -> tuple[Row, ...]:
        """Returns rows of a gated MLP and the norm before it."""
        norm = self.norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", hidden)
        return norm, *self.swiglu("mlp", "mlp", hidden, inner)

    def moe(
        self, hidden: int, inner: int, experts: int, *, shared: int = 0, selection: bool = False
    ) -> tuple[Row, ...]:
        """Returns rows of a router, its gated experts and the norm before them.

        `shared`: total inner size of the shared experts; `selection`: the router has a bias used for selection only
        (DeepSeek-V3 Technical Report, 2412.19437, 2.1.2)."""
        gate = "mlp.gate"
        rows = [
            self.norm("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden),
            self.row("mlp.router.weight", [(gate, (experts, hidden))]),
        ]
        if selection:
            bias = [(gate, (experts,))]
            rows.append(self.row("mlp.router.expert_bias", bias, kind="e_score_correction_bias", dtype="float32"))
        if shared:
            rows += self.swiglu("mlp.shared_experts", "mlp.shared_experts", hidden, shared)
        return *rows, *self.swiglu("mlp.experts", "mlp.experts.{expert}", hidden, inner, suffix="{expert}")


def embedding(hf: HfConfig, *, mtp: int = 0) -> Row:
    """Returns the row of the word embedding. The last stage has a second copy for a tied output layer or for `mtp`
    layers of multi-token prediction; megatron-core sums the gradients of both."""
    name = "embedding.word_embeddings.weight"
    copies: tuple[tuple[Stage, str], ...] = ()
    if hf.get("tie_word_embeddings", False):
        copies = (("last", "output_layer.weight"),)
    elif mtp:
        copies = (("last", name),)
    shape = hf["vocab_size"], hf["hidden_size"]
    return Row(name, (("model.embed_tokens.weight", shape),), axis=0, stage="first", copies=copies)


def tied_copies(hf: HfConfig) -> dict[str, str]:
    """Returns `Table.aliases` of a tied model: some checkpoints store the output layer although it is the embedding
    (published Qwen3-0.6B and 1.7B do)."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if hf.get("tie_word_embeddings", False) else {}


def head(hf: HfConfig) -> tuple[Row, ...]:
    """Returns rows of the last norm and, unless it is tied to the embedding, the output layer."""
    hidden = hf["hidden_size"]
    norm = Row("decoder.final_layernorm.weight", (("model.norm.weight", (hidden,)),), stage="last")
    output = Row("output_layer.weight", (("lm_head.weight", (hf["vocab_size"], hidden)),), axis=0, stage="last")
    return (norm,) if hf.get("tie_word_embeddings", False) else (norm, output)
