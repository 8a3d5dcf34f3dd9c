"""Describes SGLang's rotary embeddings, so that exact mode can compute them. Written for sglang 0.5.23."""

from __future__ import annotations

from typing import Any

from slimx.extras.exact.operations import Llama3, Rotary, Yarn

KINDS = ("RotaryEmbedding", "Llama3RotaryEmbedding", "DeepseekScalingRotaryEmbedding")
"""Class names of the rotary embeddings that `rotary_of` supports."""


def rotary_of(module: Any) -> Rotary:
    """Returns the description of `module`, an SGLang rotary embedding of a class in KINDS."""
    scaling: Llama3 | Yarn | None = None
    if type(module).__name__ == "Llama3RotaryEmbedding":
        scaling = Llama3(
            float(module.scaling_factor),
            float(module.low_freq_factor),
            float(module.high_freq_factor),
            int(module.orig_max_position),
        )
    elif type(module).__name__ == "DeepseekScalingRotaryEmbedding":
        scaling = Yarn(
            float(module.scaling_factor),
            int(module.max_position_embeddings),  # context length before the extension
            float(module.beta_fast),
            float(module.beta_slow),
            float(module.mscale),
        )
    return Rotary(int(module.rotary_dim), float(module.base), scaling)
