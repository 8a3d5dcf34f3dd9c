"""Tiny models, rollouts and configurations of test_trainer, from numpy and torch alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from slimx.config.schema import Config
from slimx.data.records import Group, Prompt, Span, Trajectory
from slimx.models.families import read_model

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 2.0,
        "beta_slow": 0.25,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen": {"hf": QWEN, "mtp": 0, "routes": (3, 2), "dtype": "float32", "recompute": "none"},
    "deepseek": {"hf": DEEPSEEK, "mtp": 1, "routes": None, "dtype": "float32", "recompute": "full"},
    "qwen-bf16": {"hf": QWEN, "mtp": 0, "routes": (3, 2), "dtype": "bfloat16", "recompute": "selective"},
}
"""`mtp`: layers of multi-token prediction that are trained; `routes`: layers and experts of a token in the
engine's routes, which the trainer compares with its own; None: there are none."""
STEPS = 3
"""Optimizer steps before the checkpoint; one more follows it, twice: before and after it is restored."""
VERSION = 3
"""The engines' weight version at every step."""
LR = 1e-3


def config(path: Path, out: Path, case: dict[str, Any]) -> Config:
    """GRPO with KL to a reference. Adam's epsilon stands above the noise of a gradient: without it Adam would give a
    weight whose gradient is all rounding a whole step in a random direction."""
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": str(path)},
            "numerics": {"dtype": case["dtype"]},
            "trainer": {
                "max_tokens_per_microbatch": 96,
                "recompute": {"granularity": case["recompute"]},
                "optimizer": {"lr": LR, "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 1.0},
                "megatron": {"mtp_num_layers": case["mtp"]} if case["mtp"] else {},
            },
            "rollout": {"prompts": "p"},
            "schedule": {"steps": STEPS + 1},
            "algorithm": {"name": "grpo", "reference": True, "kl_coef": 0.5},
        }
    )


def rollouts(seed: int, routes: tuple[int, int] | None) -> list[Group]:
    """Groups of 2 to 5 rollouts of 12 to 48 tokens, with random routes."""
    random, out = np.random.default_rng(seed), []
    for number in range(4):
        trajectories = []
        for index in range(2 + number):
            prompt, length = int(random.integers(3, 8)), int(random.integers(12, 49))
            logprobs = np.where(np.arange(length) < prompt, np.nan, random.normal(-4.8, 0.1, length))
            trajectories.append(
                Trajectory(
                    id=f"{number}.{index}",
                    rollout_id=f"{number}.{index}",
                    group_id=str(number),
                    index=index,
                    token_ids=random.integers(1, 128, length).astype(np.int32),
                    loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
                    logprobs=logprobs.astype(np.float32),
                    spans=[
                        Span(start=0, stop=prompt, source="prompt"),
                        Span(start=prompt, stop=length, source="sampled", version=VERSION - index % 2),
                    ],
                    sampling={"temperature": 0.8},
                    routed_experts=_routes(random, length - 1, *routes) if routes else None,
                    reward=float(random.normal()),
                )
            )
        out.append(Group(id=str(number), prompt=Prompt(id=str(number), token_ids=[1]), trajectories=trajectories))
    return out


def _routes(random: np.random.Generator, tokens: int, layers: int, topk: int) -> np.ndarray:
    """`topk` different experts of 8 for each token and layer."""
    return random.random((tokens, layers, 8)).argsort(-1)[..., :topk].astype(np.uint8)


def write_model(path: Path, hf: dict[str, Any], mtp: int, seed: int) -> Path:
    """A checkpoint of random weights in `path`: norms around 1, the rest far from uniform."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(hf))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in read_model(path, mtp_layers=mtp).table.checkpoint_shapes().items():
        norm = "norm" in name and len(shape) == 1
        scale = 0.1 if len(shape) > 1 else 0.05
        tensors[name] = torch.randn(shape, generator=generator) * scale + norm
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
