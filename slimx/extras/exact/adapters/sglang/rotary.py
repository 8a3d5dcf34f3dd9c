"""SGLang's rotary embeddings as exact mode describes them. Written for sglang 0.5.23."""

from __future__ import annotations

from typing import Any

from slimx.extras.exact.operations import Llama3, Rotary, Yarn

KINDS = ("RotaryEmbedding", "Llama3RotaryEmbedding", "DeepseekScalingRotaryEmbedding")
"""Classes that `rotary_of` knows."""


def rotary_of(module: Any) -> Rotary:
    """The description of a module of one of these classes."""
    scaling = None
    if type(module).__name__ == "Llama3RotaryEmbedding":
        parts = module.scaling_factor, module.low_freq_factor, module.high_freq_factor, module.orig_max_position
        scaling = Llama3(*(float(part) for part in parts[:3]), int(parts[3]))
    elif type(module).__name__ == "DeepseekScalingRotaryEmbedding":
        scaling = Yarn(
            float(module.scaling_factor),
            int(module.max_position_embeddings),  # before the stretching
            float(module.beta_fast),
            float(module.beta_slow),
            float(module.mscale),
        )
    return Rotary(int(module.rotary_dim), float(module.base), scaling)
