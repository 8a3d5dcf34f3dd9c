"""The models whose losses must not depend on the layout."""

from __future__ import annotations

from tests.integration.deepseek_v3_oracle import MODELS, SHAPE
from tests.towers import SHALLOW

LAYERS, EXPERTS = 4, 8

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts": EXPERTS,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **SHAPE,
    **{key: value for key, value in MODELS["V3"].items() if key != "num_mtp_layers"},
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
NEXT = QWEN | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_expert_intermediate_size": 24,
    "linear_conv_kernel_dim": 4,
    # The ranks of TP2 x CP2 have a key head each.
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
PLACEHOLDER = 120
VISION = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **{key: value for key, value in QWEN.items() if key not in ("architectures", "model_type")},
        "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "vision_config": SHALLOW | {"deepstack_visual_indexes": [0]},  # the first stage of uneven layouts has one layer
    "tie_word_embeddings": False,
    "image_token_id": PLACEHOLDER,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    **{name: QWEN[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{
        name: QWEN[name] for name in ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
    },
    "hybrid_override_pattern": "ME*M",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 10,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
