"""Tiny models of whole blocks of fp8, and what a publication to engines makes of their weights."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.engine import EngineLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import EngineSizes
from slimx.layout.table import checkpoint_parts
from slimx.models.families import read_model
from slimx.reshard.pack.packer import Packer
from slimx.reshard.plan.copy_plan import compile_plan
from tests.integration.conftest import Weights
from tests.integration.deepseek_checkpoint import make_deepseek
from tests.integration.seeded import QUICKSTART, write_seeded

WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "torch_dtype": "bfloat16",
}
"""Two ranks of tensor parallelism have whole blocks of 128 each."""
LATENT = {
    "torch_dtype": "bfloat16",
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
"""The same of DEEPSEEK: two of its heads make a block of columns of the output projection."""
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SPARSE = {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts"} | {
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
}
"""Fields that a dense model's config.json does not have."""


def make_block_model(out: Path, *, dense: bool = False, layers: int = 2) -> Path:
    """A seeded Qwen3-MoE, or Qwen3, of `layers` layers in bf16, no tensor constant, with the quickstart's tokenizer."""
    hf: dict[str, Any] = runpy.run_path(str(QUICKSTART))["CONFIG"] | WIDE | {"num_hidden_layers": layers}
    if dense:
        hf = {key: value for key, value in (hf | DENSE).items() if key not in SPARSE}
    write_seeded(hf, out, torch.bfloat16)
    return out


def make_block_deepseek(out: Path) -> Path:
    """A seeded DeepSeek-V3 of two layers, the first dense, in bf16."""
    make_deepseek(out, **LATENT)
    weights = load_file(out / "model.safetensors")
    halves = {name: w if name.endswith("e_score_correction_bias") else w.bfloat16() for name, w in weights.items()}
    save_file(halves, out / "model.safetensors", {"format": "pt"})
    return out


def in_fp8(model: Path, out: Path, rule: str = "ieee") -> Path:
    """A directory made as `slimx convert hf-to-fp8` makes it."""
    convert(run.hf_to_fp8(model, rule=rule), out, threads=1, verify=False)
    return out


def published(model: Path, sizes: EngineSizes, rule: str = "ieee") -> list[Weights]:
    """What every rank of an engine gets of `model`'s weights by a publication in its own layout."""
    spec, weights = read_model(model), load_file(model / "model.safetensors")
    plan = compile_plan(
        checkpoint_parts(spec.table),
        EngineLayout(spec.engine_table(), sizes).parts(),
        precision=Precision("bfloat16", "bfloat16", quantization(rule)),
        bucket_bytes=2**62,
        ranks=sizes.world,
    )
    packer = Packer(plan, 0, weights)
    form = packer.form(0)
    memory = torch.zeros(form.size, dtype=torch.uint8)
    packer.pack(0, memory)
    tensors = [
        (t.name, memory[start : start + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape))
        for t, start in zip(form.tensors, form.offset.tolist(), strict=True)
    ]
    edges = form.first.tolist()
    return [dict(tensors[start:stop]) for start, stop in zip(edges, edges[1:], strict=False)]
