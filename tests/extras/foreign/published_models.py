"""Published models by the names that launch scripts have for them: a published config.json with the fields in which
they differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.extras.families.test_glm_and_minimax import FLASH, MINIMAX
from tests.extras.low_precision.test_int4_rules import INT4
from tests.needed import ROOT
from tests.published import DEEPSEEK_V3, QWEN3_30B, published

QWEN2 = json.loads((ROOT / "configs/recipes/models/Qwen2.5-0.5B-Instruct/config.json").read_text())
VL_8B = json.loads((ROOT / "configs/recipes/models/Qwen3-VL-8B-Instruct/config.json").read_text())
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 40960, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000.0, "vocab_size": 151936,
}  # fmt: skip


def _sizes(hidden: int, layers: int, heads: int, inner: int, **other: object) -> dict[str, object]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        **other,
    }  # fmt: skip


def _qwen3_5(layers: int, text: dict[str, object], moe: dict[str, object] | None = None) -> dict[str, Any]:
    """Returns the config.json of a model of the family Qwen3.5."""
    base = published("Qwen3.5-35B-A3B")
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    inner = base["text_config"] | {"layer_types": kinds, "num_hidden_layers": layers} | text
    if moe is None:
        base["architectures"] = ["Qwen3_5ForConditionalGeneration"]
        for key in [
            key for key in inner if "expert" in key or key in ("moe_intermediate_size", "router_aux_loss_coef")
        ]:
            del inner[key]
    base["text_config"] = inner | (moe or {})
    base["tie_word_embeddings"] = inner["tie_word_embeddings"]
    base["vision_config"] = base["vision_config"] | {"out_hidden_size": inner["hidden_size"]}
    return base


_plain = {key: value for key, value in DEEPSEEK_V3.items() if key not in ("quantization_config", "rope_scaling")}
MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-R1": DEEPSEEK_V3,
    "GLM-4.7-355B-A32B": published("GLM-4.5"),
    "GLM-4.7-Flash": FLASH,
    "GLM-5": published("GLM-5"),
    "GLM-5.2": published("GLM-5"),
    "Kimi-K2-Instruct": published("Kimi-K2-Instruct"),
    "Kimi-K2-Thinking": published("Kimi-K2-Instruct"),
    "Kimi-K2.6": published("Kimi-K2.5-bf16"),
    "MiMo-7B-RL": published("MiMo-7B-Base"),
    "MiniMax-M2.5": MINIMAX,
    "Moonlight-16B-A3B": _plain | _sizes(
        2048, 27, 16, 11264, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, q_lora_rank=None,
        num_key_value_heads=16, num_experts_per_tok=6, first_k_dense_replace=1, n_group=1, topk_group=1,
        routed_scaling_factor=2.446, vocab_size=163840, rope_theta=50000, rms_norm_eps=1e-5,
        max_position_embeddings=8192, num_nextn_predict_layers=0,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": published("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "Qwen2.5-0.5B-Instruct": QWEN2,
    "Qwen2.5-3B": QWEN2 | _sizes(2048, 36, 16, 11008),
    "Qwen2.5-VL-7B": QWEN2 | _sizes(
        3584, 28, 28, 18944, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl",
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, image_token_id=151655, video_token_id=151656,
        vision_start_token_id=151652, vision_end_token_id=151653,
        vision_config={
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_channels": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2, "model_type": "qwen2_5_vl",
        },
    ),
    "Qwen2.5-32B": QWEN2 | _sizes(
        5120, 64, 40, 27648, num_key_value_heads=8, vocab_size=152064, tie_word_embeddings=False
    ),
    "Qwen2.5-Math-7B": QWEN2 | _sizes(
        3584, 28, 28, 18944, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
        max_position_embeddings=4096,
    ),
    "Qwen3-235B-A22B": published("Qwen3-235B-A22B"),
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-32B": QWEN3 | _sizes(5120, 64, 64, 25600, tie_word_embeddings=False),
    "Qwen3-4B": QWEN3 | _sizes(2560, 36, 32, 9728, tie_word_embeddings=True),
    "Qwen3-8B": QWEN3 | _sizes(4096, 36, 32, 12288, tie_word_embeddings=False),
    "Qwen3-Next-80B-A3B": published("Qwen3-Next-80B-A3B-Instruct"),
    "Qwen3-VL-235B-A22B": published("Qwen3-VL-235B-A22B-Instruct"),
    "Qwen3-VL-30B-A3B": published("Qwen3-VL-30B-A3B-Instruct"),
    "Qwen3-VL-8B": VL_8B,
    "Qwen3.5-122B-A10B": _qwen3_5(
        48, {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 2, "linear_num_value_heads": 64},
        {"num_experts": 256, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024},
    ),
    "Qwen3.5-27B": _qwen3_5(
        64, {"hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 17408,
             "linear_num_value_heads": 48},
    ),
    "Qwen3.5-35B-A3B": published("Qwen3.5-35B-A3B"),
    "Qwen3.6-35B-A3B": published("Qwen3.5-35B-A3B"),
    "Qwen3.5-397B-A17B": published("Qwen3.5-397B-A17B"),
    "Qwen3.5-4B": _qwen3_5(
        32, {"hidden_size": 2560, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 9216,
             "tie_word_embeddings": True},
    ),
    "Qwen3.5-9B": _qwen3_5(
        32, {"hidden_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 12288},
    ),
}  # fmt: skip
"""config.json by name of the model, without endings such as -Base."""
_LONG = {"Qwen3-4B-Instruct-2507", "Qwen3-235B-A22B-Instruct-2507"}


def model_of(path: str) -> str | None:
    """Returns the name in `MODELS` of the checkpoint at `path`; None if its family is not one of slimx's."""
    name = Path(path).name
    near = [known for known in MODELS if re.match(re.escape(known) + r"($|-|/)", name, re.IGNORECASE)]
    return max(near, key=len, default=None)


def write_model(path: str, folder: Path) -> Path | None:
    """Writes the config.json of the checkpoint at `path` into a folder below `folder`, and returns that folder; None if
    its family is not one of slimx's."""
    name = model_of(path)
    if name is None:
        return None
    config = MODELS[name]
    if Path(path).name in _LONG:
        config = config | {"max_position_embeddings": 262144}
    if "FP8" in Path(path).name:
        config = config | {"quantization_config": DEEPSEEK_V3["quantization_config"]}
    if "INT4" in Path(path).name:
        config = config | {"quantization_config": INT4}
    target = folder / Path(path).name
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    return target
