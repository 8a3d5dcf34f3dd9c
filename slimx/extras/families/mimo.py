"""MiMo-7B: a Qwen2 whose checkpoints bring layers of multi-token prediction (MiMo, 2505.07608).

Those layers are not built: their projection takes hidden state and embedding in the other order than megatron-core's.
Exports carry them over as they are."""

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
from slimx.models.fields import Fields

ARCHITECTURE = "MiMoForCausalLM"


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    return qwen2.unsupported(hf) or unusual(hf, ("attention_bias", True), ("tie_word_embeddings", False))


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor; layers of multi-token prediction are `frozen`."""
    table, hidden = qwen2.weight_table(hf), hf["hidden_size"]
    of_layer = dict(source for row in table.rows if row.stage == "layer" for source in row.sources)
    own = {f"{name}.weight": (hidden,) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    own["input_proj.weight"] = (hidden, 2 * hidden)
    there = "model.layers.{layer}."
    own |= {name.removeprefix(there): shape for name, shape in of_layer.items()}
    layers = range(hf.get("num_nextn_predict_layers") or 0)
    return replace(table, frozen={f"model.mtp_layers.{n}.{name}": shape for n in layers for name, shape in own.items()})


def engine_table(hf: Fields, *, fused_shared_experts: bool = False) -> Table:
    """Raises SlimxError: no engine of it was ever tried."""
    raise no_engine(ARCHITECTURE, "none was ever tried")
