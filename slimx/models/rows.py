"""The rows that families share, as megatron-core names the tensors; a family's file says which of them its model has.

A row's name is Megatron's, its sources are Hugging Face's. Where SGLang holds the same tensors: `engine_rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Self

from slimx.layout.maps import Concat, InterleaveQKV
from slimx.layout.table import Row, Stage

Named = Iterable[tuple[str, tuple[int, ...]]]
"""Names of checkpoint tensors, without prefix and kind, and their shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention: its sizes, and which of the optional tensors it has."""

    hidden: int
    heads: int
    groups: int
    """Heads of key and value."""
    head: int
    """Dimension of each head."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """A norm over each head of query and key, with one weight for all heads."""
    output_gate: bool = False
    """A gate behind every head of the query's projection: its sigmoid multiplies the attention's output."""
    projection_norm: bool = False
    """A norm over all heads of the query together and one over those of the key, shared by the ranks as the heads are.
    """

    @classmethod
    def of(cls, hf: dict[str, Any], **optional: bool) -> Self:
        """Sizes out of config.json, under the names that nearly all families give them."""
        hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
        groups, head = hf.get("num_key_value_heads"), hf.get("head_dim")
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
        """The checkpoint's projections of query, key and value with their numbers of rows."""
        rows = (self.heads * self.head * (1 + self.output_gate), *(self.groups * self.head,) * 2)
        return tuple((f"self_attn.{kind}_proj", count) for kind, count in zip("qkv", rows, strict=True))


@dataclass(frozen=True, slots=True)
class Layer:
    """Writes the rows of one kind of layer: prefixes of its names and of its sources', and where it stands."""

    here: str = "decoder.layers.{layer}."
    there: str = "model.layers.{layer}."
    stage: Stage = "layer"
    layers: Collection[int] | None = None
    """Layers that have the rows; None: all."""

    def row(self, name: str, sources: Named, *, kind: str = "weight", **how: Any) -> Row:
        """A row `name` whose sources are tensors `kind` of the modules that `sources` names; `how`: fields of `Row`."""
        full = tuple((f"{self.there}{source}.{kind}", shape) for source, shape in sources)
        return Row(self.here + name, full, stage=self.stage, layers=self.layers, **how)

    def norm(self, name: str, source: str, size: int) -> Row:
        """A vector that every rank holds whole."""
        return self.row(name, [(source, (size,))])

    def linear(self, name: str, source: str, shape: tuple[int, int], axis: int | None = None, **how: Any) -> Row:
        """A matrix that fp8 checkpoints hold in blocks."""
        return self.row(name, [(source, shape)], axis=axis, quantised=True, **how)

    def swiglu(self, name: str, source: str, hidden: int, inner: int, suffix: str = "") -> tuple[Row, Row]:
        """Gate and up in one tensor, and down; of experts with `{expert}` in `source` and as `suffix`."""
        gate, up, down = (f"{source}.{kind}_proj" for kind in ("gate", "up", "down"))
        both = [(gate, (inner, hidden)), (up, (inner, hidden))]
        return (
            self.row(f"{name}.linear_fc1.weight{suffix}", both, map=Concat(), axis=0, quantised=True),
            self.linear(f"{name}.linear_fc2.weight{suffix}", down, (hidden, inner), axis=1),
        )

    def attention(self, sizes: Attention) -> tuple[Row, ...]:
        """The norm before it and grouped-query attention."""
        heads = InterleaveQKV(sizes.heads, sizes.groups, sizes.head, gated=sizes.output_gate)
        matrices = [(name, (count, sizes.hidden)) for name, count in sizes.qkv]
        at, out = "self_attention.", (sizes.hidden, sizes.heads * sizes.head)
        rows = [
            self.norm(at + "linear_qkv.layer_norm_weight", "input_layernorm", sizes.hidden),
            self.row(at + "linear_qkv.weight", matrices, map=heads, axis=0, quantised=True),
        ]
        if sizes.qkv_bias:
            vectors = [(name, (count,)) for name, count in sizes.qkv]
            rows.append(self.row(at + "linear_qkv.bias", vectors, kind="bias", map=heads, axis=0))
        if sizes.qk_norm:
            rows += [self.norm(f"{at}{kind}_layernorm.weight", f"self_attn.{kind}_norm", sizes.head) for kind in "qk"]
        if sizes.projection_norm:
            for kind, (_, width) in zip("qk", sizes.qkv, strict=False):
                name, source = f"{at}{kind}_layernorm.weight", f"self_attn.{kind}_norm"
                rows.append(self.row(name, [(source, (width,))], axis=0))
        rows.append(self.linear(at + "linear_proj.weight", "self_attn.o_proj", out, axis=1))
        if sizes.output_bias:
            rows.append(self.row(at + "linear_proj.bias", [("self_attn.o_proj", (sizes.hidden,))], kind="bias"))
        return tuple(rows)

    def dense(self, hidden: int, inner: int) -> tuple[Row, ...]:
        """The norm before it and a gated MLP."""
        norm = self.norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", hidden)
        return norm, *self.swiglu("mlp", "mlp", hidden, inner)

    def moe(
        self, hidden: int, inner: int, experts: int, *, shared: int = 0, selection: bool = False
    ) -> tuple[Row, ...]:
        """The norm before it, a router and gated experts; `shared`: inner size of the shared ones together;
        `selection`: the router has a bias that only chooses (DeepSeek-V3 Technical Report, 2412.19437, 2.1.2)."""
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


def embedding(hf: dict[str, Any], *, mtp: int = 0) -> Row:
    """The word embedding, with the second copy that the last stage has: of a tied output layer, or for `mtp` layers of
    multi-token prediction. megatron-core sums the gradients of both."""
    name = "embedding.word_embeddings.weight"
    tied = hf.get("tie_word_embeddings", False)
    copies = (("last", "output_layer.weight"),) if tied else (("last", name),) if mtp else ()
    shape = hf["vocab_size"], hf["hidden_size"]
    return Row(name, (("model.embed_tokens.weight", shape),), axis=0, stage="first", copies=copies)


def tied_copies(hf: dict[str, Any]) -> dict[str, str]:
    """The output layer that a tied model's checkpoint may store though it is the embedding (published Qwen3-0.6B and
    1.7B do), as `Table.aliases`."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if hf.get("tie_word_embeddings", False) else {}


def head(hf: dict[str, Any]) -> tuple[Row, ...]:
    """The last norm, and the output layer unless it is the embedding."""
    hidden = hf["hidden_size"]
    norm = Row("decoder.final_layernorm.weight", (("model.norm.weight", (hidden,)),), stage="last")
    output = Row("output_layer.weight", (("lm_head.weight", (hf["vocab_size"], hidden)),), axis=0, stage="last")
    return (norm,) if hf.get("tie_word_embeddings", False) else (norm, output)
