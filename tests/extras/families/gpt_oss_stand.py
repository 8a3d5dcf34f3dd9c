"""A tiny gpt-oss and its checkpoint, shared by the tests of its layout and of its files."""

from __future__ import annotations

from typing import Any

from slimx.extras.families import gpt_oss
from tests.unit.layout.layout_stand import Model, Tensors, checkpoint

HF: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    # As in the published files; transformers 5 writes rope_parameters.
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
TABLE = gpt_oss.weight_table(HF)
NUMBERED = checkpoint(Model(HF, TABLE))
"""A checkpoint in which the elements are numbered from 1."""


def sources(whole: Tensors) -> Tensors:
    """The tensors by the names that the table gives them, found by plain indexing."""
    out = {}
    for name in TABLE.sources():
        stack, bracket, rest = name.partition("[")
        tensor = whole[stack]
        if bracket:
            tensor = tensor[int(rest.partition("]")[0])]
            tensor = tensor.T if rest.endswith(".T") else tensor
        out[name] = tensor
    return out
