"""GLM-4.7-Flash: a DeepSeek-V3 under a name of its own, which SGLang serves with a router that weighs in fp32."""

from __future__ import annotations

from slimx.extras.families import deepseek_v3, deepseek_v3_engine
from slimx.extras.families.deepseek_v3 import gpt_arguments as gpt_arguments
from slimx.extras.families.deepseek_v3 import mtp_layers as mtp_layers
from slimx.extras.families.deepseek_v3 import transformer_config as transformer_config
from slimx.extras.families.deepseek_v3 import weight_table as weight_table
from slimx.extras.families.sigmoid_router import unsupported_places
from slimx.layout.table import Table
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.fields import Fields

ARCHITECTURE = "Glm4MoeLiteForCausalLM"
FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM = True
"""The same limit as GLM-4.5's (`slimx.extras.families.glm4_moe`)."""


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    return unsupported_places(hf) or deepseek_v3.unsupported(hf)


def engine_table(hf: Fields, *, fused_shared_experts: bool = False) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor (`sglang.srt.models.glm4_moe_lite`)."""
    return deepseek_v3_engine.engine_table(hf, fused_shared_experts=fused_shared_experts, gate_dtype="float32")
