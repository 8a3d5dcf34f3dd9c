"""Family Qwen3.5 without experts, text model only: gated delta nets and gated attention, and an MLP in every layer."""

from __future__ import annotations

from slimx.extras.recurrent.delta_nets import layer_kind as layer_kind
from slimx.extras.recurrent.families import qwen3_5_text
from slimx.extras.recurrent.families.delta_net import gpt_arguments as gpt_arguments
from slimx.extras.recurrent.families.delta_net import transformer_config as transformer_config
from slimx.extras.recurrent.families.qwen3_5_text import unsupported as unsupported
from slimx.extras.recurrent.families.qwen3_5_text import weight_table as weight_table
from slimx.layout.table import Table
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig

ARCHITECTURE = "Qwen3_5ForCausalLM"


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model. Raises SlimxError if
    SGLang would build a different model from config.json `hf`."""
    return qwen3_5_text.engine_table(hf, ARCHITECTURE, fused_shared_experts=fused_shared_experts)
