"""Two tiny models of transformers' DeepSeek-V3: one with compressed queries, yarn, expert groups and a layer of
multi-token prediction (V3), one without any of them (Moonlight)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration import prediction_oracle

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 163840,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
MODELS = {
    "V3": {
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "rope_parameters": YARN,
        "num_mtp_layers": 1,
    },
    "Moonlight": {
        "q_lora_rank": None,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "num_mtp_layers": 0,
    },
}


class Oracle(prediction_oracle.Oracle):
    """A DeepSeek-V3."""

    def __init__(self, path: Path, seed: int, fields: dict[str, Any]):
        super().__init__(path, seed, "DeepseekV3Config", SHAPE | fields)
