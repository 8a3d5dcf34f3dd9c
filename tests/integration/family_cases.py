"""The tiny models of test_families: for every family a configuration of transformers whose sizes divide, with no two
dimensions alike where an exchanged pair could hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slimx.layout.ranks import Sizes
from tests.integration import bailing_oracle, deepseek_v3_oracle, nested_oracle, prediction_oracle, vision_oracle
from tests.integration.family_oracle import Fill, Oracle, scatter, scatter_slow_decays, stock_model
from tests.towers import TOWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model."""

    make: Callable[[Path, int], Oracle]
    """(directory, seed) -> the model of transformers, its checkpoint written."""
    dense: bool = False
    """Without experts to split."""
    family: str | None = None
    """Module that defines it, where slimx does not bring it."""
    biased: bool = False
    """With biases of experts, which expert tensor parallelism would add up."""
    mtp: int = 0
    """Layers of multi-token prediction that the trainer builds."""
    thorough: bool = False
    """Also in bfloat16, saved and restored as a trainer's checkpoint, and begun from a release of Megatron-LM."""
    cut: bool = False
    """Also in layouts that cut sequences (context parallelism)."""

    vision: str | None = None
    """The value of `trainer.vision.train` if the demonstrations show images."""
    rounding: float = 2e-5
    """Tolerance of a gradient, as a share of the tensor's largest element."""

    def fits(self, sizes: Sizes) -> bool:
        """Returns True if the model can be split like that."""
        if sizes.context > 1 and not self.cut:
            return False
        return not (self.dense and sizes.expert > 1) and not (self.biased and sizes.expert_tensor > 1)


def stock(config: str, *without: str, fill: Fill = scatter, **fields: Any) -> Callable[[Path, int], Oracle]:
    """A model that transformers knows, from the name of its configuration's class and what differs from `SHAPE`."""
    shape = {name: value for name, value in SHAPE.items() if name not in without}
    return lambda path, seed: Oracle(path, stock_model(path, seed, config, {**shape, **fields}, fill))


hybrid = partial(stock, fill=scatter_slow_decays)
"""The same with gated delta nets or Mamba-2 layers."""


def predicting(config: str, **fields: Any) -> Callable[[Path, int], Oracle]:
    """The same with a layer of multi-token prediction, if its `num_mtp_layers` says so."""
    return lambda path, seed: prediction_oracle.Oracle(path, seed, config, {**SHAPE, **fields})


def sparse(config: str, **fields: Any) -> Callable[[Path, int], Oracle]:
    """A DeepSeek-V3 with sparse attention and a layer of multi-token prediction."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    fields = {**shape, **deepseek_v3_oracle.SHAPE, **SPARSE, "num_nextn_predict_layers": 1, **fields}
    return lambda path, seed: prediction_oracle.Oracle(path, seed, config, fields)


def deepseek(name: str) -> Callable[[Path, int], Oracle]:
    return lambda path, seed: deepseek_v3_oracle.Oracle(path, seed, deepseek_v3_oracle.MODELS[name])


def mimo(path: Path, seed: int) -> Oracle:
    return nested_oracle.MiMo(path, seed, {name: value for name, value in SHAPE.items() if name != "head_dim"})


def seeing(
    config: str,
    tower: dict[str, Any],
    fill: Fill = scatter,
    kind: type[vision_oracle.VisionOracle] = vision_oracle.WithImages,
    without: tuple[str, ...] = (),
    **fields: Any,
) -> Callable[[Path, int], Oracle]:
    """A vision-language model as published, from the fields of its language model and of its tower; with demonstrations
    that show images unless `kind` is another."""
    text = {name: value for name, value in SHAPE.items() if name not in without} | fields
    return lambda path, seed: kind(path, seed, config, text, tower, fill)


SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
"""A half of each head rotates."""
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_hidden_layers": 4,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "rope_parameters": ROTARY,
}
FLASH = {
    "q_lora_rank": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
}
SPARSE = {
    "q_lora_rank": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-6,
    "index_topk": 5,  # the demonstrations have 6 to 39 tokens
    "index_head_dim": 12,
    # Many: a key that every head scores 0 for is tied with all others like it.
    "index_n_heads": 32,
}
GPT_OSS = {
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 5,  # the demonstrations have 6 to 39 tokens
    "swiglu_limit": 0.5,  # low enough to cut some
    # Frequencies of which some are scaled, some are not, and some lie between.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
}
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 24,  # of which a quarter rotates
    # Two value heads to each key head; 4 ranks that share the heads (TP, CP) have one each.
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
HYBRID_EXPERTS = {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 24}
DEEP_TOWER = {**TOWER, "deepstack_visual_indexes": [0, 2]}
"""With features for the first two decoder layers."""
ROTARY_OF_IMAGES = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 3, 3],
    "mrope_interleaved": True,
}
INTERLEAVED = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    }
}
WINDOWED_TOWER = {name: value for name, value in TOWER.items() if name != "num_position_embeddings"}
WINDOWED_TOWER |= {"window_size": 16, "fullatt_block_indexes": [1]}
"""With windows of two embeddings per axis."""
INTERPOLATING_TOWER = {name: value for name, value in TOWER.items() if "position" not in name}
INTERPOLATING_TOWER |= {"image_size": 24, "rms_norm_eps": 1e-5}
MOONVIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "merge_kernel_size": [2, 2],
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
NEMOTRON = {
    "num_key_value_heads": 2,
    "hybrid_override_pattern": "ME*-ME",
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 10,
    "layer_norm_epsilon": 1e-5,
    "time_step_min": 1e-30,  # by which transformers alone bounds every step
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
CASES: dict[str, Case] = {
    "V3": Case(make=deepseek("V3"), mtp=1, thorough=True),
    "Moonlight": Case(make=deepseek("Moonlight")),
    "V3.2": Case(
        make=sparse("DeepseekV32Config", n_group=4, topk_group=2, rope_parameters=deepseek_v3_oracle.YARN),
        mtp=1,
        thorough=True,
        cut=True,
    ),
    "GLM-5": Case(
        make=sparse("GlmMoeDsaConfig", rope_parameters={"rope_type": "default", "rope_theta": 1e6}), mtp=1, cut=True
    ),
    "GLM-5.2": Case(
        make=sparse(
            "GlmMoeDsaConfig",
            num_hidden_layers=8,
            indexer_types=["full", "shared", "shared", "shared"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        mtp=1,
        cut=True,
    ),
    # transformers' own gradients of the sinks and of the keys' biases are 1.2e-5 off those in float64.
    "gpt-oss": Case(make=stock("GptOssConfig", **GPT_OSS), biased=True, rounding=6e-5),
    "Qwen3-MoE": Case(make=stock("Qwen3MoeConfig", **EXPERTS, norm_topk_prob=True)),
    "Llama": Case(make=stock("LlamaConfig", rope_parameters=LLAMA_3), dense=True),
    "Llama-tied": Case(make=stock("LlamaConfig", rope_parameters=LLAMA_3, tie_word_embeddings=True), dense=True),
    "Qwen2": Case(make=stock("Qwen2Config", "head_dim"), dense=True),
    "Qwen2-tied": Case(make=stock("Qwen2Config", "head_dim", tie_word_embeddings=True), dense=True, thorough=True),
    "Qwen3": Case(make=stock("Qwen3Config"), dense=True),
    "Qwen3-tied": Case(make=stock("Qwen3Config", tie_word_embeddings=True), dense=True),
    "GLM-4.5": Case(make=predicting("Glm4MoeConfig", **GLM, use_qk_norm=True, num_mtp_layers=1), mtp=1),
    "GLM-4.5-Air": Case(
        make=stock("Glm4MoeConfig", **GLM, use_qk_norm=False, first_k_dense_replace=2, num_mtp_layers=0)
    ),
    "GLM-4.7-Flash": Case(
        make=stock("Glm4MoeLiteConfig", "head_dim", **{**deepseek_v3_oracle.SHAPE, **FLASH}, rms_norm_eps=1e-6)
    ),
    "MiniMax-M2": Case(
        make=stock("MiniMaxM2Config", num_local_experts=8, num_experts_per_tok=3, rope_parameters=ROTARY),
        thorough=True,
    ),
    "Kimi-K2.5": Case(
        make=seeing(
            "Kimi_K25Config",
            MOONVIT,
            kind=vision_oracle.KimiK25,
            without=("head_dim",),
            **deepseek_v3_oracle.SHAPE,
            **{**deepseek_v3_oracle.MODELS["V3"], "num_mtp_layers": 0, "num_nextn_predict_layers": 0},
            rms_norm_eps=1e-6,
        ),
        thorough=True,
        cut=True,
        vision="tower",
        rounding=1e-5,
    ),
    # Engines are refused.
    "MiMo": Case(make=mimo, dense=True),
    # transformers' own gradients are 1.5e-4 (Qwen3-Next) and 7e-5 off those in float64.
    "Qwen3-Next": Case(make=hybrid("Qwen3NextConfig", **HYBRID_EXPERTS), thorough=True, cut=True, rounding=6e-5),
    "Qwen3.5-MoE": Case(make=hybrid("Qwen3_5MoeTextConfig", **HYBRID_EXPERTS), thorough=True, cut=True, rounding=6e-5),
    "Qwen3.5": Case(make=hybrid("Qwen3_5TextConfig", **HYBRID), dense=True, cut=True),
    "Qwen3.5-MoE, published": Case(
        make=seeing(
            "Qwen3_5MoeConfig",
            TOWER,
            scatter_slow_decays,
            vision_oracle.VisionOracle,
            **HYBRID_EXPERTS,
        ),
        thorough=True,
        cut=True,
        rounding=6e-5,
    ),
    # With images, transformers' own gradients are 1.4e-4 (with experts) and 2.5e-5 off those in float64.
    "Qwen3.5-MoE, images": Case(
        make=seeing("Qwen3_5MoeConfig", TOWER, scatter_slow_decays, **HYBRID_EXPERTS, **INTERLEAVED),
        thorough=True,
        cut=True,
        vision="tower",
        rounding=2e-4,
    ),
    "Qwen3.5, images": Case(
        make=seeing("Qwen3_5Config", TOWER, scatter_slow_decays, **HYBRID, **INTERLEAVED),
        dense=True,
        cut=True,
        vision="tower",
        rounding=6e-5,
    ),
    "Qwen3-VL": Case(
        make=seeing("Qwen3VLConfig", DEEP_TOWER, rope_parameters=ROTARY_OF_IMAGES, num_hidden_layers=4),
        dense=True,
        cut=True,
        vision="tower",
        rounding=1e-5,
    ),
    "Qwen3-VL-MoE": Case(
        make=seeing("Qwen3VLMoeConfig", DEEP_TOWER, rope_parameters=ROTARY_OF_IMAGES, num_hidden_layers=4, **EXPERTS),
        thorough=True,
        cut=True,
        vision="tower",
        rounding=1e-5,
    ),
    "Qwen2.5-VL": Case(
        make=seeing(
            "Qwen2_5_VLConfig",
            WINDOWED_TOWER,
            without=("head_dim",),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        ),
        dense=True,
        cut=True,
        vision="tower",
        rounding=1e-5,
    ),
    # transformers' own gradients are 2.3e-5 off those in float64.
    "GLM-4.5V": Case(
        make=seeing(
            "Glm4vMoeConfig",
            INTERPOLATING_TOWER,
            **{**GLM, "rope_parameters": {**ROTARY, "mrope_section": [2, 2, 1]}},
        ),
        thorough=True,
        cut=True,
        vision="tower",
    ),
    # Added from outside, as docs/models.md says.
    "Mixtral": Case(
        make=stock("MixtralConfig", num_local_experts=8, num_experts_per_tok=3),
        family="examples.mixtral",
        thorough=True,
    ),
    # transformers' own gradients of decays are 4.5e-5 off those in float64.
    "Nemotron-3": Case(
        make=hybrid("NemotronHConfig", "num_hidden_layers", "rms_norm_eps", **NEMOTRON), thorough=True, rounding=6e-5
    ),
    "Ling-2": Case(make=bailing_oracle.Oracle, mtp=1, thorough=True),
}
