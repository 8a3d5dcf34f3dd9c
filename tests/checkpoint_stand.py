"""Random Hugging Face checkpoints of any family and size, written tensor by tensor from its weight table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slimx.models.families import read_model

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def write_checkpoint(
    directory: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, *, file_bytes: int = 2**30
) -> Path:
    """Every tensor that `config` declares, in files of about `file_bytes`; one of them is in memory at a time."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text("{}")
    table = read_model(directory, mtp_layers=config.get("num_nextn_predict_layers", 0)).table
    dtypes = {name: entry.row.dtype for entry in table.entries() for name in entry.sources}
    generator = torch.Generator().manual_seed(1)
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    number = 0

    def flush() -> None:
        nonlocal number
        if tensors:
            name = f"model-{number:05d}.safetensors"
            save_file(tensors, directory / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, name))
            tensors.clear()
            number += 1

    for name, shape in table.checkpoint_shapes().items():
        kind = getattr(torch, dtypes[name]) if dtypes.get(name) else dtype  # a stack has none
        tensors[name] = torch.empty(shape, dtype=torch.float32).uniform_(-1, 1, generator=generator).to(kind)
        if sum(tensor.nbytes for tensor in tensors.values()) >= file_bytes:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal in dtype and bits, or only in one of the two."""
    odd = sorted(found.keys() ^ expected.keys())
    return odd + [
        n
        for n in found.keys() & expected.keys()
        if found[n].dtype != expected[n].dtype or not _equal(n, found, expected)
    ]


def _equal(name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    a, b = found[name], expected[name]
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
