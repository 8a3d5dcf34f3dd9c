"""A tiny DeepSeek-V3 checkpoint that engines of several ranks can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.seeded import write_seeded

# Sizes that every rank count here divides: SGLang's CPU path pads heads and inner sizes that do not.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "rope_theta": 10000.0,
    # SGLang's CPU path knows no other rotary embedding for this family.
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}


def make_deepseek(out: Path, **other: Any) -> None:
    """A seeded DeepSeek-V3 with the quickstart's tokenizer; no tensor is constant, so that none can hide. `other`:
    fields that it has in place of DEEPSEEK's."""
    write_seeded(DEEPSEEK | other, out)
