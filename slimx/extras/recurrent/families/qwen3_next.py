"""Family Qwen3-Next (80B-A3B and tiny models): three layers with gated delta nets for each layer with gated attention,
and many small experts with a shared one in every layer. Multi-token prediction layers are copied to exports, not
trained."""

from __future__ import annotations

from typing import Any

from slimx.extras.recurrent.delta_nets import layer_kind as layer_kind
from slimx.extras.recurrent.families import delta_net
from slimx.extras.recurrent.families.delta_net import gpt_arguments as gpt_arguments
from slimx.extras.recurrent.families.delta_net import unsupported as unsupported
from slimx.layout.table import Table
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.fields import HfConfig

ARCHITECTURE = "Qwen3NextForCausalLM"


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and dtype."""
    return {**delta_net.transformer_config(hf), **delta_net.moe_fields(hf)}


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because multi-token prediction layers are not trained."""
    return delta_net.weight_table(hf, delta_net.by_key_head, delta_net.prediction_tensors(hf))


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.qwen3_next`).

    Raises SlimxError if SGLang would build a different model from config.json `hf`, including if `hf` lacks a field
    whose default in SGLang differs from the published value.
    """
    delta_net.check_served(hf, ARCHITECTURE, fused_shared_experts=fused_shared_experts)
    if hf.get("rope_theta") is None:
        raise delta_net.unserved(
            ARCHITECTURE,
            "rope_theta",
            "is missing from config.json, so SGLang 0.5.23 would serve a different model; set rope_theta as in the "
            "published config.json",
        )
    if hf.get("tie_word_embeddings"):
        raise delta_net.unserved(
            ARCHITECTURE,
            "tie_word_embeddings",
            "is true in config.json, but SGLang 0.5.23 always builds a separate output layer; untie the embeddings "
            "of the checkpoint, or train without engines",
        )
    return delta_net.engine_table(hf, delta_net.as_stored)
