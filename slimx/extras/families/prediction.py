"""Layers of multi-token prediction as DeepSeek-V3's checkpoints have them (2412.19437, 2.2): numbered after the others,
each with its own projection and norm, sharing the model's embedding and output layer."""

from __future__ import annotations

from collections.abc import Callable

from slimx.extras.families.sigmoid_router import moe_rows
from slimx.layout.table import Row, Table
from slimx.models.fields import Fields
from slimx.models.rows import Layer, embedding, head


def mtp_layers(hf: Fields) -> int:
    """Layers of multi-token prediction that the checkpoint declares."""
    return hf.get("num_nextn_predict_layers") or 0


def table_with_prediction(
    hf: Fields,
    attention: Callable[[Layer], tuple[Row, ...]],
    *,
    mtp: int,
) -> Table:
    """The table of a model with this `attention`, dense first layers, experts behind DeepSeek-V3's router in the others
    and `mtp` layers of multi-token prediction.

    Those that the checkpoint declares beyond `mtp` are frozen; embeddings and output layers of their
    own, which some checkpoints store, are aliases."""
    layers, dense, declared = hf["num_hidden_layers"], hf["first_k_dense_replace"], mtp_layers(hf)
    experts = hf["n_routed_experts"]
    rows = (
        embedding(hf, mtp=mtp),
        *attention(Layer()),
        *(Layer(layers=range(dense)).dense(hf["hidden_size"], hf["intermediate_size"]) if dense else ()),
        *moe_rows(hf, Layer(layers=range(dense, layers))),
        *head(hf),
    )
    predicting = _rows(hf, Layer("mtp.layers.{layer}.", stage="mtp"), attention)
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
        frozen=unbuilt.checkpoint_shapes(),
    )


def _rows(hf: Fields, at: Layer, attention: Callable[[Layer], tuple[Row, ...]]) -> tuple[Row, ...]:
    """Projection of (embedding, hidden state), a decoder layer, a norm."""
    hidden, inside = hf["hidden_size"], Layer(at.here + "mtp_model_layer.", at.there, stage=at.stage)
    return (
        at.norm("enorm.weight", "enorm", hidden),
        at.norm("hnorm.weight", "hnorm", hidden),
        at.row("eh_proj.weight", [("eh_proj", (hidden, 2 * hidden))], axis=0),
        *attention(inside),
        *moe_rows(hf, inside),
        at.norm("final_layernorm.weight", "shared_head.norm", hidden),
    )
