"""The models on which exact mode is measured: the quickstart's in other sizes, dense or with experts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from slimx.extras.quickstart.make_model import CONFIG, make_tokenizer  # noqa: E402

SIZES = {
    "tiny": {},
    "hidden512": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1536,
        "moe_intermediate_size": 256,
    },
}
"""Differences from the quickstart's model."""
OF_EXPERTS = re.compile("expert|moe|topk|sparse|mlp_only|router")
"""Pattern of the fields that a dense model's config.json does not have."""


def make_model(out: Path, size: str, *, experts: bool) -> int:
    """Writes a Qwen3, or a Qwen3-MoE of 8 experts, with random weights into `out`; returns the number of its token
    ids."""
    if experts:
        config, classes = CONFIG | SIZES[size], (Qwen3MoeConfig, Qwen3MoeForCausalLM)
    else:
        kept = {key: value for key, value in (CONFIG | SIZES[size]).items() if not OF_EXPERTS.search(key)}
        name = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        config, classes = kept | name, (Qwen3Config, Qwen3ForCausalLM)
    torch.manual_seed(0)
    classes[1](classes[0](**config)).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config))
    make_tokenizer().save_pretrained(out)
    return config["vocab_size"]
