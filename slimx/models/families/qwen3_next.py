"""Qwen3-Next (80B-A3B and tiny ones): three layers of gated delta nets to one of gated attention, and many small
experts with a shared one in every layer. Layers of multi-token prediction are carried over, not trained."""

from __future__ import annotations

from typing import Any

from slimx.errors import SlimxError
from slimx.layout.table import Table
from slimx.models import delta_net
from slimx.models.decoder import mtp_layers as mtp_layers
from slimx.models.delta_net import gpt_arguments as gpt_arguments
from slimx.models.delta_net import unsupported as unsupported

ARCHITECTURE = "Qwen3NextForCausalLM"


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that define the model (no parallelism, no dtype)."""
    return {**delta_net.transformer_config(hf), **delta_net.moe_fields(hf)}


def weight_table(hf: dict[str, Any], mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    return delta_net.weight_table(hf, delta_net.by_key_head, delta_net.prediction_tensors(hf))


def engine_table(hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor (`sglang.srt.models.qwen3_next`).

    Raises SlimxError for a config.json without the fields of the published ones, for which SGLang has defaults of
    another model, and for what it would build otherwise."""
    for key in ("full_attention_interval", "rope_theta"):
        if hf.get(key) is None:
            raise _unserved(key, "is missing, and SGLang 0.5.23 would serve another model; write it into config.json")
    every = hf["full_attention_interval"]
    attention = tuple(range(every - 1, hf["num_hidden_layers"], every))
    if delta_net.layers_of(hf, "full_attention") != attention:
        raise _unserved(
            "layer_types", f"is not one layer of attention in {every}, which is all that SGLang 0.5.23 builds"
        )
    if hf.get("tie_word_embeddings"):
        raise _unserved("tie_word_embeddings", "is set, and SGLang 0.5.23 builds an output layer of its own")
    if fused_shared_experts:
        raise _unserved(
            "shared_expert_intermediate_size",
            "belongs to an expert behind a gate, whose place among the others was never compared; leave "
            "rollout.engines.sglang.enforce_shared_experts_fusion out",
        )
    return delta_net.engine_table(hf, delta_net.by_key_head)


def _unserved(key: str, why: str) -> SlimxError:
    return SlimxError(f"{ARCHITECTURE}: {key} {why}", code="model.served_field", about=key)
