"""Family Qwen3.5, 3.6 and 3.8 with experts, as published: language model and vision tower."""

from __future__ import annotations

from typing import Any

from slimx.extras.recurrent.families import delta_net
from slimx.extras.vision.families import qwen3_5_published
from slimx.extras.vision.families.qwen3_5_published import UNTRAINED as UNTRAINED
from slimx.extras.vision.families.qwen3_5_published import gpt_arguments as gpt_arguments
from slimx.extras.vision.families.qwen3_5_published import layer_kind as layer_kind
from slimx.extras.vision.families.qwen3_5_published import mtp_layers as mtp_layers
from slimx.extras.vision.families.qwen3_5_published import unsupported as unsupported
from slimx.extras.vision.families.qwen3_5_published import weight_table as weight_table
from slimx.extras.vision.nesting import text_config
from slimx.layout.table import Table
from slimx.models.fields import HfConfig

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    text = text_config(hf)
    return {**delta_net.transformer_config(text), **delta_net.moe_fields(text)}


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model. Raises SlimxError if
    SGLang would build a different model from config.json `hf`."""
    return qwen3_5_published.engine_table(hf, ARCHITECTURE, fused_shared_experts=fused_shared_experts)
