"""SGLang's own LoRA layers around a tiny Qwen3 on the CPU, once as SGLang makes them and once without pinned memory.

    python -m tests.unit.adapters.lora_engine MODEL

MODEL is a directory with a checkpoint of one layer. Prints one JSON object: the error with which SGLang ends where
torch finds no GPU, and the place in its files ("pinned"); the largest distance of its outputs from those of the merged
weights, over tokens that ask for two adapters and for none ("distance"), and the largest that the adapters make
("effect").
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from slimx.adapters.sglang import absent
from slimx.engines.server.launch import prepare
from tests.unit.adapters.engines_on_meta import built

RANK, ALPHAS = 4, {"first": 8.0, "second": 2.0}
PARTS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
"""SGLang's module -> the checkpoint's that it fuses."""
TARGETS = [part for parts in PARTS.values() for part in parts]
TOKENS = [("first", 3), (None, 2), ("second", 4)]
"""Adapter and tokens of each request of the batch."""

Tensors = dict[str, torch.Tensor]


class Unpinned(TorchFunctionMode):
    """Memory that would be pinned for copies to a GPU stays as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return args[0] if function is torch.Tensor.pin_memory else function(*args, **given)


def managed(model: torch.nn.Module) -> Any:
    """SGLang's manager of the adapters beside `model`, which it wraps."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.runtime_context import get_server_args

    return LoRAManager(
        base_model=model,
        base_hf_config=model.config,
        max_loras_per_batch=len(ALPHAS) + 1,
        load_config=LoadConfig(),
        dtype=torch.float32,
        server_args=get_server_args(),
        lora_backend="torch_native",
        max_lora_rank=RANK,
        target_modules=TARGETS,
    )


def adapters(checkpoint: Tensors) -> dict[str, Tensors]:
    """Adapters in PEFT's names beside every projection of `checkpoint`, by name."""
    generator, out = torch.Generator().manual_seed(1), {}
    for name in ALPHAS:
        out[name] = {}
        for weight, value in checkpoint.items():
            module = weight.removesuffix(".weight")
            if module.rpartition(".")[2] in TARGETS:
                for letter, shape in (("A", (RANK, value.shape[1])), ("B", (value.shape[0], RANK))):
                    key = f"base_model.model.{module}.lora_{letter}.weight"
                    out[name][key] = torch.randn(shape, generator=generator) * 0.1
    return out


def merged(checkpoint: Tensors, tensors: Tensors, alpha: float, module: str) -> torch.Tensor:
    """The weight of `module` with the adapter `tensors`."""
    a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
    return checkpoint[f"{module}.weight"] + alpha / RANK * b @ a


def serve(manager: Any, given: dict[str, Tensors]) -> None:
    """Load adapters as the server's endpoint does, and prepare a batch of `TOKENS`."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for name, tensors in given.items():
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHAS[name], "target_modules": TARGETS}
        reference = LoRARef(lora_id=name, lora_name=name, lora_path="__tensor__", pinned=True)
        told = manager.load_lora_adapter_from_tensors(reference, tensors, config)
        assert told.success, told.error_message
    names = [name for name, _ in TOKENS]
    manager.fetch_new_loras(set(names))
    lengths = [count for _, count in TOKENS]
    manager.prepare_lora_batch(
        SimpleNamespace(
            lora_ids=names,
            batch_size=len(names),
            forward_mode=ForwardMode.EXTEND,
            extend_seq_lens_cpu=lengths,
            extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
            extend_num_tokens=sum(lengths),
        )
    )


def main() -> None:
    path = sys.argv[1]
    absent.install()
    prepare(["--device", "cpu"])
    model = built(path, 0, 1, {"dtype": "float32"}, device="cpu")
    checkpoint: Tensors = load_file(Path(path) / "model.safetensors")
    model.load_weights(iter(checkpoint.items()))
    told: dict[str, Any] = {}
    try:
        managed(model)
    except RuntimeError as error:
        frames = (frame for frame in traceback.extract_tb(error.__traceback__) if "sglang" in frame.filename)
        told["pinned"] = {"error": str(error), "file": Path([*frames][-1].filename).name}
    given = adapters(checkpoint)
    with Unpinned(), torch.no_grad():
        manager = managed(built_again(model, path, checkpoint))
        serve(manager, given)
        apart, effects = [], []
        for module, parts in PARTS.items():
            name = f"model.layers.0.{module}"
            layer = manager.base_model.get_submodule(name)
            below = name.rpartition(".")[0]
            x = torch.randn(sum(c for _, c in TOKENS), checkpoint[f"{below}.{parts[0]}.weight"].shape[1])
            found, start = layer(x)[0], 0
            for adapter, count in TOKENS:
                rows = slice(start, start + count)
                base, whole = (
                    torch.cat(
                        [
                            checkpoint[f"{below}.{part}.weight"]
                            if tensors is None
                            else merged(checkpoint, tensors, ALPHAS[adapter], f"{below}.{part}")
                            for part in parts
                        ]
                    )
                    for tensors in (None, given.get(adapter))
                )
                apart.append((found[rows] - x[rows] @ whole.T).abs().max().item())
                effects.append((x[rows] @ (whole - base).T).abs().max().item())
                start += count
    print(json.dumps(told | {"distance": max(apart), "effect": max(effects)}))


def built_again(model: torch.nn.Module, path: str, checkpoint: Tensors) -> torch.nn.Module:
    """A model like `model`, which a manager that failed may have wrapped in part."""
    fresh = type(model)(config=model.config)
    fresh.load_weights(iter(checkpoint.items()))
    return fresh


if __name__ == "__main__":
    main()
