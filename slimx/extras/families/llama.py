"""Llama 3, 3.1, 3.2 and 3.3 (dense, text): grouped-query attention without norms or biases, and a gated MLP."""

from __future__ import annotations

from typing import Any

from slimx.layout.table import Table
from slimx.models import decoder
from slimx.models.decoder import dense_engine_table, dense_table
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import Fields
from slimx.models.rows import Attention

ARCHITECTURE = "LlamaForCausalLM"

_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only values with which megatron-core 0.19.2 scales rotary frequencies (`RotaryEmbedding._apply_scaling`): those
of all published Llama 3 models. Only `factor` can be chosen."""


def transformer_config(hf: Fields) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig."""
    return decoder.decoder_fields(hf, Attention.of(hf))


def gpt_arguments(hf: Fields) -> dict[str, Any]:
    """Arguments of megatron-core's GPTModel; positions are scaled from 3.1 on."""
    kind, fields = decoder.rotary(hf)
    scaled = {"rope_scaling": True, "rope_scaling_factor": fields["factor"]} if kind == "llama3" else {}
    return decoder.gpt_arguments(hf) | scaled


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    if scaled := decoder.scaled_otherwise(hf, "default", "llama3"):
        return scaled
    kind, fields = decoder.rotary(hf)
    if kind == "llama3":
        for key, only in _SCALING.items():
            if fields[key] != only:
                return f"rope_scaling.{key} {fields[key]} instead of {only}"
    usual = (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"))
    return decoder.unusual(hf, *usual) or decoder.quantised_otherwise(hf)


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    return dense_table(hf, Attention.of(hf))


def engine_table(hf: Fields, *, fused_shared_experts: bool = False) -> Table:
    """SGLang's layout of every checkpoint tensor (`sglang.srt.models.llama`); there are no experts to fuse."""
    return dense_engine_table(hf, Attention.of(hf), "tensor")
