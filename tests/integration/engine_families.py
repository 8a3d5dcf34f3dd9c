"""Tiny checkpoints of the families that SGLang's CPU path serves in addition to Qwen3-MoE and DeepSeek-V3, with every
field of config.json that SGLang reads, as published ones have. And the logits of their models, by transformers where it
knows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slimx.extras.quickstart import make_vision_model
from tests.integration import bailing_oracle
from tests.integration.deepseek_checkpoint import DEEPSEEK
from tests.integration.family_oracle import scatter
from tests.integration.seeded import write_seeded, write_tokenizer
from tests.integration.vision_oracle import KIMI_SIZES, KIMI_TOWER, publish, write_processor

# Sizes that every rank count here divides: SGLang's CPU path pads heads and inner sizes that do not.
COMMON = {
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
DENSE = {key: value for key, value in COMMON.items() if key not in ("num_experts_per_tok", "scoring_func")}
DENSE["intermediate_size"] = 192
HYBRID = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARING = {
    "num_experts_per_tok": 4,
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}

KIMI_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def with_tower(text: dict[str, Any], architecture: str, model_type: str, **vision: Any) -> dict[str, Any]:
    """Returns config.json of a vision-language model as published, around the language model `text`. `vision`: fields
    of the tower other than those of `VISION`."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float32",
        "text_config": {**text, "model_type": f"{model_type}_text"},
        "vision_config": {**VISION, **vision, "model_type": f"{model_type}_vision"},
        "tie_word_embeddings": text["tie_word_embeddings"],
        **make_vision_model.TOKENS,
    }


MODELS: dict[str, dict[str, Any]] = {
    "glm4_moe": COMMON
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    },
    "qwen3": DENSE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    "qwen2": DENSE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "llama": DENSE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    "mixtral": DENSE
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "minimax_m2": COMMON
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "intermediate_size": 64,
        "num_local_experts": 8,
        "rotary_dim": 16,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    },
    "qwen3_next": DENSE
    | HYBRID
    | SHARING
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # How the rotation is parted between the axes of images, as files of models with a vision tower say.
    "qwen3_5_moe": DENSE
    | HYBRID
    | SHARING
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "rope_parameters": ROTARY | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    "qwen3_5": DENSE
    | HYBRID
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_parameters": ROTARY,
        "tie_word_embeddings": True,
    },
    "bailing_moe_v2": bailing_oracle.FIELDS
    | COMMON
    | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
}


for bare, published in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")):
    MODELS[f"{bare}_published"] = with_tower(MODELS[bare], f"{published}ForConditionalGeneration", bare)


IMAGE_ROTARY = {"mrope_section": [8, 4, 4], "mrope_interleaved": True, "rope_type": "default"}
DEEP = {"depth": 4, "deepstack_visual_indexes": [0, 1, 3]}
"""SGLang adds the features of exactly three layers to a model with experts."""
MODELS["qwen3_vl"] = with_tower(
    {**MODELS["qwen3"], "rope_scaling": IMAGE_ROTARY}, "Qwen3VLForConditionalGeneration", "qwen3_vl", **DEEP
)
MODELS["qwen3_vl_moe"] = with_tower(
    {
        **MODELS["qwen3"],
        **{key: value for key, value in SHARING.items() if not key.startswith("shared")},
        "moe_intermediate_size": 192,  # transformers does not transpose square matrices
        "norm_topk_prob": True,
        "rope_scaling": IMAGE_ROTARY,
    },
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    **DEEP,
)
MODELS["qwen2_5_vl"] = {
    **MODELS["qwen2"],
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]},
    "vision_config": {
        **{key: value for key, value in VISION.items() if not key.startswith(("num_pos", "deep"))},
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    **make_vision_model.TOKENS,
}
"""As published: the fields of the language model at the top level. SGLang takes other patches for embeddings."""
MODELS["glm4v_moe"] = {
    **with_tower(
        {
            **MODELS["glm4_moe"],
            "use_qk_norm": False,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
        },
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        hidden_act="silu",
        image_size=96,
        rms_norm_eps=1e-5,
        attention_bias=False,
    ),
    **{f"{name}_token_id": 102 + k for k, name in enumerate(("image_start", "image_end", "video_start", "video_end"))},
}
"""SGLang takes images between the tokens of videos for frames."""
MODELS["kimi_k25"] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "torch_dtype": "float32",
    "text_config": DEEPSEEK,
    "vision_config": {
        **KIMI_TOWER,
        **{f"{prefix}{size}": KIMI_VISION[size] for size in KIMI_SIZES for prefix in ("", "vt_")},
        **{f"{prefix}pos_emb_{axis}": 8 for axis in ("height", "width") for prefix in ("", "init_")},
        "init_pos_emb_time": 4,
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": KIMI_VISION["hidden_size"],
        "text_hidden_size": COMMON["hidden_size"],
    },
    "projection_hidden_size": KIMI_VISION["hidden_size"],
    "tie_word_embeddings": False,
    "media_placeholder_token_id": make_vision_model.TOKENS["image_token_id"],
    "image_token_id": make_vision_model.TOKENS["image_token_id"],
}
"""SGLang and transformers ignore the fields whose names begin with vt_."""


def make_model(name: str, out: Path) -> None:
    """Makes a seeded model with the quickstart's tokenizer; no tensor is constant, so that none can hide."""
    hf = MODELS[name]
    if not _ling(hf):
        write_seeded(hf, out)
        if "vision_config" in hf:
            publish(out)
            write_processor(hf, out)
            make_vision_model.write_tokenizer(out)
            if hf["model_type"] == "kimi_k25":  # whose processor in transformers knows the token by its name
                for file in (*out.glob("tokenizer*.json"), *out.glob("*.jinja")):
                    file.write_text(file.read_text().replace("<|image_pad|>", "<|media_pad|>"))
        return
    torch.manual_seed(1)
    model = bailing_oracle.Ling(hf)
    scatter(model)
    bailing_oracle.write(model, out)
    write_tokenizer(out)


def logits(model: Path, ids: list[int]) -> torch.Tensor:
    """Returns [L, vocab] of the float32 model in directory `model`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    hf = json.loads((model / "config.json").read_text())
    with torch.no_grad():
        if _ling(hf):
            return bailing_oracle.load(model)(torch.tensor(ids))
        kind = AutoModelForImageTextToText if "vision_config" in hf else AutoModelForCausalLM
        loaded = kind.from_pretrained(model, dtype=torch.float32).eval()
        return loaded(torch.tensor([ids])).logits[0]


def _ling(hf: dict[str, Any]) -> bool:
    return hf["architectures"] == bailing_oracle.FIELDS["architectures"]
