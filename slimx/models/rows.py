"""Rows of trainers' weight tables that several families use; a family's module selects those that its model has.

Each table row relates a parameter, under megatron-core's name, to the Hugging Face tensors (its sources) that it
contains. `engine_rows` does the same for SGLang's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self, TypedDict, Unpack

from slimx.layout.maps import Concat, IndexMap, InterleaveQKV
from slimx.layout.table import Group, Row, Sources, Stage
from slimx.models.fields import HfConfig

Named = Iterable[tuple[str, tuple[int, ...]]]
"""Pairs of a checkpoint module's name, without the layer's prefix, and the shape of its tensor."""


class RowOptions(TypedDict, total=False):
    """Optional fields of `slimx.layout.table.Row`, as keyword arguments of functions that create rows."""

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
    """Number of key and value heads."""
    head: int
    """Number of dimensions of each head."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """True if each query head and each key head is normalized separately, with one weight for all query heads and one
    for all key heads."""
    output_gate: bool = False
    """True if each query head has a gate: the head's attention output is multiplied by the gate's sigmoid."""
    projection_norm: bool = False
    """True if queries are normalized over all query heads together, and keys over all key heads. TP splits these norms'
    weights like the heads."""

    @classmethod
    def of(cls, hf: HfConfig, **optional: bool) -> Self:
        """Returns the sizes in config.json `hf`, read from the fields that nearly all families use. `optional`: fields
        of this class to set to True, for tensors that only some families have."""
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
            raise ValueError(f"{self.heads} attention heads are not a multiple of {self.groups} key and value heads")

    @property
    def qkv(self) -> tuple[tuple[str, int], ...]:
        """Names of the checkpoint's query, key and value projections, each with its number of rows."""
        rows = (self.heads * self.head * (1 + self.output_gate), *(self.groups * self.head,) * 2)
        return tuple((f"self_attn.{kind}_proj", count) for kind, count in zip("qkv", rows, strict=True))


@dataclass(frozen=True, slots=True)
class Layer:
    """Factory of the weight-table rows of one kind of layer. `prefix` and `source_prefix`: prefixes of the parameters'
    names and of their source tensors' names; `stage`: pipeline stage that stores the parameters."""

    prefix: str = "decoder.layers.{layer}."
    source_prefix: str = "model.layers.{layer}."
    stage: Stage = "layer"
    layers: Collection[int] | None = None
    """Indices of the layers that have these parameters; None: all."""

    def row(self, name: str, sources: Named, *, kind: str = "weight", **options: Unpack[RowOptions]) -> Row:
        """Returns the weight-table row of parameter `name`, which contains one tensor from each of the checkpoint's
        modules in `sources`. `kind`: name of that tensor in its module, such as weight or bias. `options`: further
        fields of `Row`."""
        full = tuple((f"{self.source_prefix}{source}.{kind}", shape) for source, shape in sources)
        return Row(self.prefix + name, full, stage=self.stage, layers=self.layers, **options)

    def norm(self, name: str, source: str, size: int) -> Row:
        """Returns the weight-table row of a norm's weight `name`, a vector [size] that every rank stores in full.
        `source`: name of the norm in the checkpoint."""
        return self.row(name, [(source, (size,))])

    def linear(self, name: str, source: str, shape: tuple[int, int], axis: int | None = None) -> Row:
        """Returns the weight-table row of the matrix `name`, which fp8 checkpoints store with block scales. `source`:
        name of its module in the checkpoint; `axis`: the axis that is split over TP ranks, None if it is not split."""
        return self.row(name, [(source, shape)], axis=axis, quantized=True)

    def swiglu(self, name: str, source: str, hidden: int, inner: int, suffix: str = "") -> tuple[Row, Row]:
        """Returns the weight-table rows of the gated MLP `name`: gate and up projections fused, and down projection.
        `source`: name of the MLP in the checkpoint; `inner`: intermediate size. For experts, `source` contains
        `{expert}`, and `suffix` is `{expert}`."""
        gate, up, down = (f"{source}.{kind}_proj" for kind in ("gate", "up", "down"))
        both = [(gate, (inner, hidden)), (up, (inner, hidden))]
        return (
            self.row(f"{name}.linear_fc1.weight{suffix}", both, map=Concat(), axis=0, quantized=True),
            self.linear(f"{name}.linear_fc2.weight{suffix}", down, (hidden, inner), axis=1),
        )

    def attention(self, sizes: Attention) -> tuple[Row, ...]:
        """Returns the weight-table rows of grouped-query attention and of the norm before it."""
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
        """Returns the weight-table rows of a dense layer's gated MLP and of the norm before it. `inner`: intermediate
        size."""
        norm = self.norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", hidden)
        return norm, *self.swiglu("mlp", "mlp", hidden, inner)

    def moe(
        self, hidden: int, inner: int, experts: int, *, shared: int = 0, selection: bool = False
    ) -> tuple[Row, ...]:
        """Returns the weight-table rows of an MoE layer: router, gated experts, and the norm before them.

        `inner`: intermediate size of a routed expert. `shared`: total intermediate size of the shared experts; 0: none.
        `selection`: True if the router has a bias that is used only to select experts (DeepSeek-V3 Technical Report,
        2412.19437, 2.1.2)."""
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
    """Returns the weight-table row of the word embedding. The last pipeline stage stores a second copy if the output
    layer is tied or if `mtp`, the number of multi-token prediction layers to train, is not 0; megatron-core sums the
    gradients of both copies."""
    name = "embedding.word_embeddings.weight"
    copies: tuple[tuple[Stage, str], ...] = ()
    if hf.get("tie_word_embeddings", False):
        copies = (("last", "output_layer.weight"),)
    elif mtp:
        copies = (("last", name),)
    shape = hf["vocab_size"], hf["hidden_size"]
    return Row(name, (("model.embed_tokens.weight", shape),), axis=0, stage="first", copies=copies)


def tied_copies(hf: HfConfig) -> dict[str, str]:
    """Returns the model's `Table.aliases`: if embeddings are tied, the output layer as a copy of the embedding;
    otherwise an empty dict. Some checkpoints with tied embeddings, such as the published Qwen3-0.6B and 1.7B, also
    store the output layer."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if hf.get("tie_word_embeddings", False) else {}


def head(hf: HfConfig) -> tuple[Row, ...]:
    """Returns the weight-table rows of the final norm and of the output layer; a tied output layer has no row, because
    it is the embedding."""
    hidden = hf["hidden_size"]
    norm = Row("decoder.final_layernorm.weight", (("model.norm.weight", (hidden,)),), stage="last")
    output = Row("output_layer.weight", (("lm_head.weight", (hf["vocab_size"], hidden)),), axis=0, stage="last")
    return (norm,) if hf.get("tie_word_embeddings", False) else (norm, output)
