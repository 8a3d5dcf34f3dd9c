"""Family Llama 3, 3.1, 3.2 and 3.3 (dense, text): grouped-query attention without query and key norms or biases, and a
gated MLP."""

from __future__ import annotations

from slimx.json_types import Json
from slimx.layout.table import Table
from slimx.models import decoder
from slimx.models.decoder import dense_engine_table, dense_table
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention

ARCHITECTURE = "LlamaForCausalLM"

_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Field of the rotary scaling -> the only supported value, which megatron-core 0.19.2 hard-codes
(`RotaryEmbedding._apply_scaling`) and all published Llama 3 models use. Only the field `factor` may differ between
models."""


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return decoder.decoder_fields(hf, Attention.of(hf))


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec. From Llama
    3.1 on, rotary frequencies are scaled."""
    kind, fields = decoder.rotary(hf)
    scaled = {"rope_scaling": True, "rope_scaling_factor": fields["factor"]} if kind == "llama3" else {}
    return decoder.gpt_arguments(hf) | scaled


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    scaled = decoder.scaled_otherwise(hf, "default", "llama3")
    if scaled:
        return scaled
    kind, fields = decoder.rotary(hf)
    if kind == "llama3":
        for key, only in _SCALING.items():
            if fields[key] != only:
                return f"rope_scaling.{key} {fields[key]} instead of {only}"
    usual = (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"))
    return decoder.unsupported_field(hf, *usual) or decoder.quantized_otherwise(hf)


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because the family has no multi-token prediction layers."""
    return dense_table(hf, Attention.of(hf))


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang's model (`sglang.srt.models.llama`).
    `fused_shared_experts` is ignored, because the model has no experts."""
    return dense_engine_table(hf, Attention.of(hf), "tensor")
