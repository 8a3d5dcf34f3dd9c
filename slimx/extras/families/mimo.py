"""Family MiMo-7B: a Qwen2 whose checkpoints contain multi-token prediction layers (MiMo, 2505.07608).

slimx does not build these layers, because their projection takes hidden state and embedding in the opposite order to
megatron-core's. Exports copy them unchanged."""

from __future__ import annotations

from dataclasses import replace

from slimx.extras.families import qwen2
from slimx.extras.families.qwen2 import transformer_config as transformer_config
from slimx.layout.table import Table
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.decoder import unsupported_field
from slimx.models.engine_rows import no_engine
from slimx.models.fields import HfConfig

ARCHITECTURE = "MiMoForCausalLM"


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    return qwen2.unsupported(hf) or unsupported_field(hf, ("attention_bias", True), ("tie_word_embeddings", False))


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because multi-token prediction layers are not trained; exports contain unchanged copies
    of them (`Table.frozen`)."""
    table = qwen2.weight_table(hf)
    hidden = hf["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "final_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
    }
    for row in table.rows:
        if row.stage == "layer":
            for name, shape in row.sources:
                shapes[name.removeprefix("model.layers.{layer}.")] = shape
    frozen = {}
    for layer in range(hf.get("num_nextn_predict_layers") or 0):
        for name, shape in shapes.items():
            frozen[f"model.mtp_layers.{layer}.{name}"] = shape
    return replace(table, frozen=frozen)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Raises SlimxError, because this family has never been tested with engines."""
    raise no_engine(ARCHITECTURE, "engines with this family were never tested")
