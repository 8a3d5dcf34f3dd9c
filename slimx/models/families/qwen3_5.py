"""Dense Qwen3.5, the text part alone: gated delta nets and gated attention with an MLP in every layer."""

from __future__ import annotations

from typing import Any

from slimx.layout.table import Table
from slimx.models import delta_net
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.delta_net import gpt_arguments as gpt_arguments
from slimx.models.delta_net import transformer_config as transformer_config
from slimx.models.engine_rows import no_engine

ARCHITECTURE = "Qwen3_5ForCausalLM"


def unsupported(hf: dict[str, Any]) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    return delta_net.unsupported_text(hf)


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    return delta_net.weight_table(hf, delta_net.by_kind, delta_net.prediction_tensors(hf))


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """Raises SlimxError: no engine of SGLang was ever compared with the trainer for this family."""
    raise no_engine(ARCHITECTURE, delta_net.NO_ENGINE)
