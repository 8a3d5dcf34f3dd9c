"""Dense decoders of Llama's shape: what Llama, Qwen2 and Qwen3 share. A family says which attention it has."""

from __future__ import annotations

from typing import Any

from slimx.layout.table import Group, Table
from slimx.models import engine_rows
from slimx.models.rows import Attention, Layer, embedding, head, tied_copies


def dense_table(hf: dict[str, Any], attention: Attention) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    layer = Layer()
    mlp = layer.dense(hf["hidden_size"], hf["intermediate_size"])
    rows = (embedding(hf), *layer.attention(attention), *mlp, *head(hf))
    return Table(rows, layers=hf["num_hidden_layers"], experts=0, aliases=tied_copies(hf))


def dense_engine_table(hf: dict[str, Any], attention: Attention, group: Group = "attention") -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor. `group`: "tensor" where its model knows no DP-attention."""
    layer = engine_rows.layer()
    rows = (
        engine_rows.embedding(hf, group),
        *engine_rows.attention(layer, attention, group),
        *engine_rows.swiglu(layer, "mlp", hf["hidden_size"], hf["intermediate_size"]),
        *engine_rows.head(hf, tied=hf.get("tie_word_embeddings", False)),
    )
    return Table(rows, layers=hf["num_hidden_layers"], experts=0)
