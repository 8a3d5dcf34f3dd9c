"""Multi-token prediction layers in DeepSeek-V3's checkpoints (arXiv:2412.19437, 2.2). They are numbered after the
decoder layers. Each has a projection, a decoder layer and a norm of its own, and shares the model's embedding and
output layer."""

from __future__ import annotations

from collections.abc import Callable

from slimx.extras.families.sigmoid_router import moe_rows
from slimx.layout.table import Row, Table
from slimx.models.fields import HfConfig
from slimx.models.rows import Layer, embedding, head


def mtp_layers(hf: HfConfig) -> int:
    """Returns the number of multi-token prediction layers that the checkpoint declares."""
    return hf.get("num_nextn_predict_layers") or 0


def table_with_prediction(
    hf: HfConfig,
    attention: Callable[[Layer], tuple[Row, ...]],
    *,
    mtp: int,
) -> Table:
    """Returns the trainer's weight table of a model whose first layers are dense and whose other layers have experts
    with DeepSeek-V3's router. `attention`: function that returns the rows of a layer's attention; `mtp`: number of
    multi-token prediction layers to train.

    Further multi-token prediction layers that the checkpoint declares are copied unchanged to exports (`Table.frozen`).
    Copies of embedding and output layer, which some checkpoints store in these layers, are exported with the values of
    their originals (`Table.aliases`)."""
    layers = hf["num_hidden_layers"]
    dense = hf["first_k_dense_replace"]
    declared = mtp_layers(hf)
    experts = hf["n_routed_experts"]
    rows = [embedding(hf, mtp=mtp), *attention(Layer())]
    if dense:
        rows += Layer(layers=range(dense)).dense(hf["hidden_size"], hf["intermediate_size"])
    rows += moe_rows(hf, Layer(layers=range(dense, layers)))
    rows += head(hf)
    predicting = _rows(hf, Layer("mtp.layers.{layer}.", stage="mtp"), attention)
    unbuilt = Table(predicting, layers=layers + mtp, experts=experts, mtp_layers=declared - mtp)
    aliases = {}
    for layer in range(layers, layers + declared):
        aliases[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        aliases[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    if mtp:
        rows += predicting
    return Table(
        tuple(rows),
        layers=layers,
        experts=experts,
        mtp_layers=mtp,
        aliases=aliases,
        frozen=unbuilt.checkpoint_shapes(),
    )


def _rows(hf: HfConfig, layer: Layer, attention: Callable[[Layer], tuple[Row, ...]]) -> tuple[Row, ...]:
    """Returns the weight-table rows of a multi-token prediction layer: norms and projection of embedding and hidden
    state, a decoder layer, and the final norm. `attention`: function that returns the rows of a layer's attention."""
    hidden = hf["hidden_size"]
    inside = Layer(layer.prefix + "mtp_model_layer.", layer.source_prefix, stage=layer.stage)
    return (
        layer.norm("enorm.weight", "enorm", hidden),
        layer.norm("hnorm.weight", "hnorm", hidden),
        layer.row("eh_proj.weight", [("eh_proj", (hidden, 2 * hidden))], axis=0),
        *attention(inside),
        *moe_rows(hf, inside),
        layer.norm("final_layernorm.weight", "shared_head.norm", hidden),
    )
