"""Qwen3-Next (80B-A3B and tiny ones): three layers of gated delta nets to one of gated attention, and many small
experts with a shared one in every layer. Layers of multi-token prediction are carried over, not trained."""

from __future__ import annotations

from typing import Any

from slimx.layout.table import Table
from slimx.models import delta_net
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.delta_net import gpt_arguments as gpt_arguments
from slimx.models.delta_net import unsupported as unsupported
from slimx.models.engine_rows import no_engine

ARCHITECTURE = "Qwen3NextForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define the model (no parallelism, no dtype)."""
    return {**delta_net.transformer_config(hf), **delta_net.moe_fields(hf)}


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    return delta_net.weight_table(hf, delta_net.by_key_head, delta_net.prediction_tensors(hf))


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """Raises SlimxError: no engine of SGLang was ever compared with the trainer for this family."""
    raise no_engine(ARCHITECTURE, delta_net.NO_ENGINE)
