"""The checkpoints that benchmarks/trainer.py trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ("qwen3_moe", "qwen3_next")


def make_model(name: str, out: Path) -> None:
    """Writes a random checkpoint: the quickstart's Qwen3-MoE, or a Qwen3-Next of its width with gated delta nets in
    three of four layers."""
    if name == "qwen3_moe":
        make = [sys.executable, str(ROOT / "slimx/extras/quickstart/make_model.py"), "--out", str(out)]
        subprocess.run(make, check=True, stdout=sys.stderr)
        return
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Qwen3NextForCausalLM(config).to(torch.float32).save_pretrained(out)
