"""Describes the rotary embedding of a megatron-core model, so that exact mode can compute it. Written for megatron-core
0.19.2."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from slimx.errors import SlimxError
from slimx.extras.exact.operations import Llama3, Rotary, Yarn, yarn_lengthening


def rotary_of(transformer: TransformerConfig, gpt: dict[str, Any]) -> Rotary:
    """Returns the rotary embedding of the model with configuration `transformer` and GPTModel arguments `gpt`. Raises
    SlimxError if the model uses other position embeddings."""
    scaling: Llama3 | Yarn | None
    if isinstance(transformer, MLATransformerConfig):
        scaling = _yarn(transformer) if transformer.rope_type == "yarn" else None
        return Rotary(transformer.qk_pos_emb_head_dim, float(transformer.rotary_base), scaling)
    if gpt["position_embedding_type"] != "rope":
        raise SlimxError(
            f"this model has position_embedding_type={gpt['position_embedding_type']} in megatron-core, but "
            "numerics.mode=exact supports only rope; set numerics.mode=fast",
            code="exact.rotary",
            about=gpt["position_embedding_type"],
        )
    # megatron-core's constants (RotaryEmbedding._apply_scaling).
    scaling = Llama3(float(gpt["rope_scaling_factor"]), 1.0, 4.0, 8192) if gpt.get("rope_scaling") else None
    dimensions = int(transformer.kv_channels * gpt.get("rotary_percent", 1.0))
    return Rotary(dimensions, float(gpt["rotary_base"]), scaling)


def _yarn(transformer: MLATransformerConfig) -> Yarn:
    factor = transformer.rotary_scaling_factor
    return Yarn(
        float(factor),
        int(transformer.original_max_position_embeddings),
        float(transformer.beta_fast),
        float(transformer.beta_slow),
        yarn_lengthening(factor, transformer.mscale) / yarn_lengthening(factor, transformer.mscale_all_dim),
    )
