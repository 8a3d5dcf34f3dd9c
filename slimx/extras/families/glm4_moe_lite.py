"""Family GLM-4.7-Flash: DeepSeek-V3 under another architecture name, which SGLang serves with an fp32 router."""

from __future__ import annotations

from slimx.extras.families import deepseek_v3, deepseek_v3_engine
from slimx.extras.families.deepseek_v3 import gpt_arguments as gpt_arguments
from slimx.extras.families.deepseek_v3 import mtp_layers as mtp_layers
from slimx.extras.families.deepseek_v3 import transformer_config as transformer_config
from slimx.extras.families.deepseek_v3 import weight_table as weight_table
from slimx.extras.families.sigmoid_router import unsupported_layers
from slimx.layout.table import Table
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.fields import HfConfig

ARCHITECTURE = "Glm4MoeLiteForCausalLM"
FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM = True
"""True, because SGLang 0.5.23 fuses the shared expert only on GPUs without expert parallelism, as for GLM-4.5."""


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    return unsupported_layers(hf) or deepseek_v3.unsupported(hf)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.glm4_moe_lite`). `fused_shared_experts`: True if SGLang stores the shared expert after the
    routed ones in the same parameters."""
    return deepseek_v3_engine.engine_table(hf, fused_shared_experts=fused_shared_experts, gate_dtype="float32")
