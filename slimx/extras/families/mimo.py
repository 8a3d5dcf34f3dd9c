"""MiMo-7B: a Qwen2 whose checkpoints have layers of multi-token prediction (MiMo, 2505.07608).

Those layers are not built: their projection takes hidden state and embedding in the opposite order from
megatron-core's. Exports copy them unchanged."""

from __future__ import annotations

from dataclasses import replace

from slimx.extras.families import qwen2
from slimx.extras.families.qwen2 import transformer_config as transformer_config
from slimx.layout.table import Table
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.decoder import unusual
from slimx.models.engine_rows import no_engine
from slimx.models.fields import HfConfig

ARCHITECTURE = "MiMoForCausalLM"


def unsupported(hf: HfConfig) -> str | None:
    """Returns the part of config.json `hf` that cannot be built; None if everything can."""
    return qwen2.unsupported(hf) or unusual(hf, ("attention_bias", True), ("tie_word_embeddings", False))


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's layout of every checkpoint tensor; layers of multi-token prediction are `frozen`."""
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
    """Raises SlimxError: engines of this family are untested."""
    raise no_engine(ARCHITECTURE, "engines of this family are untested")
