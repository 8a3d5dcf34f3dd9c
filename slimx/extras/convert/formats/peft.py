"""Writes the LoRA adapters of a checkpoint in PEFT's format, which `slimx.extras.lora.peft` describes and reads."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from slimx.errors import SlimxError
from slimx.extras.convert.formats.torch_dist_reader import read_whole
from slimx.extras.lora.peft import CONFIG, PARAMETERS, TENSORS, stack_item
from slimx.extras.megatron_files.directory import TensorLocation, find_checkpoint, locations
from slimx.models.families import ModelSpec, read_model
from slimx.models.files.safe_pickle import read_metadata
from slimx.reshard.manifest import ADAPTER_PREFIX

ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
)
"""Architectures for which exported adapters have been verified: merging them with PEFT yields the same weights as
merging in slimx."""


def export_adapters(source: Path, out: Path, original: Path, alpha: float) -> int:
    """Writes the adapters of the checkpoint `source` to the directory `out`, which must not exist, and returns their
    number of parameters. `original`: Hugging Face directory of the base model; `alpha`: value of `trainer.lora.alpha`
    in the run.

    Raises SlimxError for a checkpoint without adapters, and for an architecture that is not in `ARCHITECTURES`."""
    if out.exists():
        raise SlimxError(
            f"{out} already exists; give a directory that does not exist", code="convert.exists", about=str(out)
        )
    spec = read_model(original)
    path = find_checkpoint(source)
    if spec.family.ARCHITECTURE not in ARCHITECTURES:
        raise SlimxError(
            f"{original} has the architecture {spec.family.ARCHITECTURE}, but adapters can be exported only for "
            f"{', '.join(ARCHITECTURES)}; export merged weights with checkpoint.export_hf instead",
            code="convert.peft_family",
            about=str(original),
        )
    tensors, targets, rank = _named(spec, path)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(original),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        **{key: sorted(names) for key, names in targets.items()},
    }
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial / TENSORS, {"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(out)
    return sum(tensor.numel() for tensor in tensors.values())


def _named(spec: ModelSpec, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, set[str]], int]:
    """Returns the adapters' tensors by PEFT's names, the names to list in PEFT's target_modules and target_parameters,
    and the rank of the adapters."""
    metadata = read_metadata(path / ".metadata")
    keys = metadata.state_dict_metadata.keys()
    per_layer = any(key.startswith("decoder.layers.0.") for key in keys)
    complete: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    targets: dict[str, set[str]] = {"target_modules": set(), "target_parameters": set()}
    modules: set[str] = set()
    stacks: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    """Name of the module with a stack's adapter -> A and B of each expert."""
    rank = 0
    for location in locations(spec.table, per_layer=per_layer):
        names = [f"{location.key.removesuffix('.weight')}.lora_{letter}" for letter in "ab"]
        if not location.key.endswith(".weight") or names[0] not in keys:
            continue
        for name in names:
            if name not in complete:
                complete[name] = read_whole(path, name, metadata)
        a = complete[names[0]][location.index]
        b = complete[names[1]][location.index]
        rank = len(a)
        parts = _by_module(location, b)
        item = stack_item(location.part.sources[0])
        if item is None:
            for module, rows in parts.items():
                tensors[f"{ADAPTER_PREFIX}{module}.lora_A.weight"] = a.clone()
                tensors[f"{ADAPTER_PREFIX}{module}.lora_B.weight"] = rows
                modules.add(module)
            continue
        stacks[item.module].append((a, torch.cat(list(parts.values()))))
        targets["target_parameters"].add(f"mlp.experts.{item.parameter}")
    for module, experts in stacks.items():
        prefix = f"{ADAPTER_PREFIX}{module}"
        stack_a, stack_b = zip(*experts, strict=True)
        tensors[f"{prefix}.lora_A.weight"] = torch.cat(stack_a)
        tensors[f"{prefix}.lora_B.weight"] = torch.stack(stack_b, 2).flatten(1)
    for module, ending in _endings(modules, spec).items():
        if spec.experts and module.endswith(PARAMETERS):
            targets["target_parameters"].add(f"{ending}.weight")
        else:
            targets["target_modules"].add(ending)
    if not tensors:
        raise SlimxError(
            f"{path} contains no adapters; pass a checkpoint of a run that sets trainer.lora",
            code="convert.no_adapters",
            about=str(path),
        )
    return tensors, targets, rank


def _endings(modules: set[str], spec: ModelSpec) -> dict[str, str]:
    """Returns, for each module, the shortest suffix of its name that is not also a suffix of the name of a matrix
    without an adapter. PEFT selects modules by such suffixes."""
    taken: set[str] = set()
    for key, shape in spec.table.checkpoint_shapes().items():
        name = key.removesuffix(".weight")
        if len(shape) == 2 and name not in modules and ".experts." not in name:
            taken.update(_endings_of(name))
    out = {}
    for module in modules:
        free = [ending for ending in _endings_of(module) if ending not in taken]
        out[module] = free[0]
    return out


def _endings_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _by_module(location: TensorLocation, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Splits the rows of an adapter's matrix B [out, r] by the transformers modules to which they belong, because the
    trainer may fuse several modules into one layer. The rows of each module are in checkpoint order."""
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    for rect in location.part.rects:
        for index in range(rect.rows):
            rows[rect.source][rect.row + index * rect.step] = rect.local_row + index
    out = {}
    for source, local_rows in sorted(rows.items()):
        module = location.part.sources[source].removesuffix(".weight")
        out[module] = b[[local_rows[row] for row in sorted(local_rows)]].contiguous()
    return out
