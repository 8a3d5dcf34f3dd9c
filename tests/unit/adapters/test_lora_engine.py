"""SGLang with adapters of its own: what rules refuse, and what holds where nothing refuses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slimx.models.families import read_model
from tests.unit.sglang_process import SGLang

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@pytest.mark.costly
def test_sglang_pins_memory_for_adapters_and_computes_what_merged_weights_do_without_that(
    tmp_path: Path, sglang: SGLang
) -> None:
    """As shipped it needs a GPU (`lora.served_on_cpu`). With that taken away, one batch asks for two adapters of
    different scales and for none, and every projection is that of its own merged weights."""
    (tmp_path / "config.json").write_text(json.dumps(HF))
    generator = torch.Generator().manual_seed(1)
    shapes = read_model(tmp_path).table.checkpoint_shapes()
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    done = sglang.run("-m", "tests.unit.adapters.lora_engine", str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["pinned"]["file"] == "layers.py", told
    assert told["distance"] <= 1e-5 < 0.1 < told["effect"], told
