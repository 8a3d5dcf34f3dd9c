"""Layers of multi-token prediction as DeepSeek-V3's checkpoints have them (2412.19437, 2.2): numbered after the others,
each with its own projection and norm, sharing the model's embedding and output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slimx.layout.table import Row, Table
from slimx.models.rows import Layer


def mtp_layers(hf: dict[str, Any]) -> int:
    """Layers of multi-token prediction that the checkpoint declares."""
    return hf.get("num_nextn_predict_layers") or 0


def table_with_prediction(
    hf: dict[str, Any],
    rows: tuple[Row, ...],
    inside: Callable[[Layer], tuple[Row, ...]],
    *,
    experts: int,
    mtp: int,
    frozen: Mapping[str, tuple[int, ...]],
) -> Table:
    """The table of a model with `rows` and `mtp` layers of multi-token prediction, whose decoder layer `inside` writes.

    Those that the checkpoint declares beyond `mtp` are frozen, beside `frozen`; embeddings and output layers of their
    own, which some checkpoints store, are aliases."""
    layers, declared = hf["num_hidden_layers"], mtp_layers(hf)
    predicting = _rows(Layer("mtp.layers.{layer}.", stage="mtp"), hf["hidden_size"], inside)
    unbuilt = Table(predicting, layers=layers + mtp, experts=experts, mtp_layers=declared - mtp)
    aliases = {}
    for layer in range(layers, layers + declared):
        aliases[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        aliases[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return Table(
        (*rows, *(predicting if mtp else ())),
        layers=layers,
        experts=experts,
        mtp_layers=mtp,
        aliases=aliases,
        frozen={**unbuilt.checkpoint_shapes(), **frozen},
    )


def _rows(at: Layer, hidden: int, inside: Callable[[Layer], tuple[Row, ...]]) -> tuple[Row, ...]:
    """Projection of (embedding, hidden state), a decoder layer, a norm."""
    return (
        at.norm("enorm.weight", "enorm", hidden),
        at.norm("hnorm.weight", "hnorm", hidden),
        at.row("eh_proj.weight", [("eh_proj", (hidden, 2 * hidden))], axis=0),
        *inside(Layer(at.here + "transformer_layer.", at.there, stage=at.stage)),
        at.norm("final_layernorm.weight", "shared_head.norm", hidden),
    )
