"""Family Qwen3.5 with experts, text model only: as Qwen3-Next, but checkpoints group the rows of a delta net's input
projections by kind (queries, keys, values, gates) instead of by head."""

from __future__ import annotations

from typing import Any

from slimx.extras.recurrent.delta_nets import layer_kind as layer_kind
from slimx.extras.recurrent.families import delta_net, qwen3_5_text
from slimx.extras.recurrent.families.delta_net import gpt_arguments as gpt_arguments
from slimx.extras.recurrent.families.qwen3_5_text import unsupported as unsupported
from slimx.extras.recurrent.families.qwen3_5_text import weight_table as weight_table
from slimx.layout.table import Table
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig

ARCHITECTURE = "Qwen3_5MoeForCausalLM"


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return {**delta_net.transformer_config(hf), **delta_net.moe_fields(hf)}


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model. Raises SlimxError if
    SGLang would build a different model from config.json `hf`."""
    return qwen3_5_text.engine_table(hf, ARCHITECTURE, fused_shared_experts=fused_shared_experts)
