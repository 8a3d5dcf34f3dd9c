"""Qwen3 (0.6B to 32B, dense): grouped-query attention with normed heads and a gated MLP, in every layer."""

from __future__ import annotations

from typing import Any

from slimx.layout.table import Table
from slimx.models.decoder import (
    decoder_fields,
    dense_engine_table,
    dense_table,
    quantised_otherwise,
    scaled_otherwise,
    unusual,
)
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.rows import Attention

ARCHITECTURE = "Qwen3ForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig."""
    return decoder_fields(hf, _attention(hf))


def unsupported(hf: dict[str, Any]) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    usual = (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu"))
    return scaled_otherwise(hf, "default") or unusual(hf, *usual) or quantised_otherwise(hf)


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    return dense_table(hf, _attention(hf))


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """SGLang's layout of every checkpoint tensor (`sglang.srt.models.qwen3`); there are no experts to fuse."""
    return dense_engine_table(hf, _attention(hf))


def _attention(hf: dict[str, Any]) -> Attention:
    return Attention.of(hf, qk_norm=True)
