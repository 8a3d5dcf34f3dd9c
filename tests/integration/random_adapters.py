"""Random adapters of a Qwen3-MoE in PEFT's format, and the checkpoint that its weights become with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slimx.extras.lora.merged import merged

RANK, ALPHA = 4, 8.0
LORA = {"rank": RANK, "alpha": ALPHA, "targets": ["attention", "experts", "router"]}
ROOT = "base_model.model."


def make_adapters(model: Path, out: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """Directories under `out`: the adapters, and `model` merged with them tensor by tensor of the checkpoint, as a
    model of `dtype` has both."""
    weights = {name: value.to(dtype) for name, value in load_file(model / "model.safetensors").items()}
    random = torch.Generator().manual_seed(5)
    adapters: dict[str, torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=random)

    def merge(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        weights[name] = merged(weights[name], a.to(dtype), b.to(dtype), ALPHA / RANK)

    for layer in sorted({name.split(".")[2] for name in weights if name.startswith("model.layers.")}):
        at = f"model.layers.{layer}."
        shared = draw(RANK, weights[f"{at}self_attn.q_proj.weight"].shape[1])
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate"):
            rows, cols = weights[f"{at}{module}.weight"].shape
            a = shared.clone() if module[-6:-5] in "qkv" else draw(RANK, cols)
            b = draw(rows, RANK)
            adapters |= {f"{ROOT}{at}{module}.lora_A.weight": a, f"{ROOT}{at}{module}.lora_B.weight": b}
            merge(f"{at}{module}.weight", a, b)
        for module, parts in (("experts.base_layer", ("gate_proj", "up_proj")), ("experts", ("down_proj",))):
            names = [f"{at}mlp.experts.{{}}.{part}.weight" for part in parts]
            experts = sum(
                name.startswith(f"{at}mlp.experts.") and name.endswith("down_proj.weight") for name in weights
            )
            rows, cols = weights[names[0].format(0)].shape
            a, b = draw(experts * RANK, cols), draw(rows * len(parts), RANK * experts)
            name = f"{ROOT}{at}mlp.{module}"
            adapters |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            for expert in range(experts):
                of_expert = b.view(len(b), RANK, experts)[:, :, expert]
                for own, part in zip(of_expert.chunk(len(parts)), names, strict=True):
                    merge(part.format(expert), a[expert * RANK : (expert + 1) * RANK], own)
    peft, whole = out / "adapters", out / "merged"
    peft.mkdir(parents=True)
    save_file(adapters, peft / "adapter_model.safetensors", {"format": "pt"})
    (peft / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}))
    shutil.copytree(model, whole)
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    return peft, whole
