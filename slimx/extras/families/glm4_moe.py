"""Family GLM-4.5, 4.5-Air, 4.6 and 4.7: grouped-query attention with biases and rotary embeddings in half of each head,
and DeepSeek-V3's experts and multi-token prediction layer (GLM-4.5, 2508.06471)."""

from __future__ import annotations

from functools import partial

from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.extras.families.prediction import table_with_prediction
from slimx.extras.families.sigmoid_router import engine_draft_rows, engine_moe_table, moe_fields, unsupported_router
from slimx.json_types import Json
from slimx.layout.table import Row, Table
from slimx.models import decoder, engine_rows
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.fields import HfConfig
from slimx.models.rows import Attention

ARCHITECTURE = "Glm4MoeForCausalLM"
FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM = True
"""True, because SGLang 0.5.23 fuses the shared expert only on GPUs without expert parallelism, and otherwise ignores
requests to do so (`shared_experts_fusion_disable_reason` in `sglang.srt.models.glm4_moe`)."""


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return {**decoder.decoder_fields(hf, _attention(hf)), **moe_fields(hf)}


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return {**decoder.gpt_arguments(hf), "rotary_percent": decoder.rotary_fraction(hf, default=0.5)}


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    other = decoder.unsupported_field(hf, ("hidden_act", "silu"), ("tie_word_embeddings", False))
    scaled = decoder.scaled_otherwise(hf, "default")
    return scaled or unsupported_router(hf) or decoder.quantized_otherwise(hf) or other


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp`: number of multi-token prediction layers to train; further layers that the checkpoint declares are
    copied unchanged to exports (`Table.frozen`)."""
    return table_with_prediction(hf, lambda layer: layer.attention(_attention(hf)), mtp=mtp)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.glm4_moe`), which has an fp32 router. `fused_shared_experts`: True if SGLang stores the shared
    expert after the routed ones in the same parameters."""
    attention = engine_rows.attention(engine_rows.layer(), _attention(hf))
    return engine_moe_table(hf, attention, fused=fused_shared_experts, gate_dtype="float32")


def draft_rows(hf: HfConfig, *, fused_shared_experts: bool = False) -> tuple[Row, ...]:
    """Returns the weight-table rows of the multi-token prediction layer in SGLang's draft model
    (`sglang.srt.models.glm4_moe_nextn`). `fused_shared_experts`: True if SGLang stores the shared expert after the
    routed ones in the same parameters."""
    attention = partial(engine_rows.attention, sizes=_attention(hf))
    return engine_draft_rows(hf, attention, fused=fused_shared_experts, gate_dtype="float32")


def _attention(hf: HfConfig) -> Attention:
    return Attention.of(hf, qkv_bias=hf.get("attention_bias", False), qk_norm=hf.get("use_qk_norm", False))
