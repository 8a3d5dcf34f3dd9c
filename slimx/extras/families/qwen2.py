"""Family Qwen2 and Qwen2.5 (dense, 0.5B to 72B): grouped-query attention with biases of query, key and value, and a
gated MLP."""

from __future__ import annotations

from slimx.json_types import Json
from slimx.layout.table import Table
from slimx.models.decoder import (
    decoder_fields,
    dense_engine_table,
    dense_table,
    quantized_otherwise,
    scaled_otherwise,
    unsupported_field,
)
from slimx.models.decoder import gpt_arguments as gpt_arguments
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention

ARCHITECTURE = "Qwen2ForCausalLM"


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return decoder_fields(hf, _attention(hf))


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    usual = (("use_sliding_window", False), ("hidden_act", "silu"))
    return scaled_otherwise(hf, "default") or unsupported_field(hf, *usual) or quantized_otherwise(hf)


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because the family has no multi-token prediction layers."""
    return dense_table(hf, _attention(hf))


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang's model (`sglang.srt.models.qwen2`).
    `fused_shared_experts` is ignored, because the model has no experts."""
    return dense_engine_table(hf, _attention(hf), "tensor")


def _attention(hf: HfConfig) -> Attention:
    return Attention.of(hf, qkv_bias=True)
