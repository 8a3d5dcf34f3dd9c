"""SGLang's engine on an INT4 checkpoint of slimx, loaded on the CPU as a server on Hopper loads it.

    python -m tests.unit.adapters.int4_engines <<< '[{"path": ..., "rank": 0, "world": 1, "arguments": {...}}]'

Prints, per entry, the scheme of its routed experts, their parameters after `load_weights` that are not the file's codes
and scales, and what the rank holds when `process_weights_after_loading` has made them ready for the kernels: form and
checksum of all that a publication in the engine's own layout writes; none where codes are arranged anew.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slimx.engines.server.launch import prepare
from slimx.extras.cpu.adapters import absent
from slimx.reshard.kernels.cpu import checksum_tensor
from tests.unit.adapters.engines_on_meta import built

Tensors = dict[str, torch.Tensor]


class Repacked(Exception):
    """Codes were given to the kernel that arranges them for Marlin, which is compiled for a GPU."""


def _repack(*_: Any) -> None:
    raise Repacked


def expected(files: Tensors, prefix: str, rank: int, world: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Parameter of an engine's layer -> per expert, codes or scales of the rank's share [rows, words or groups]."""
    experts = sorted({int(name.split(".experts.")[1].split(".")[0]) for name in files if name.startswith(prefix)})
    for kind in ("packed", "scale"):
        up, down = [], []
        for expert in experts:
            parts = {m: files[f"{prefix}{expert}.{m}_proj.weight_{kind}"] for m in ("gate", "up", "down")}
            up.append(torch.cat([parts[m].chunk(world)[rank] for m in ("gate", "up")]))
            down.append(parts["down"].chunk(world, dim=1)[rank])
        yield f"w13_weight_{kind}", up
        yield f"w2_weight_{kind}", down


def described(path: str, rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    model = built(path, rank, world, arguments, device="cpu")
    files: Tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        files |= load_file(file)
    model.load_weights(iter(files.items()))
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "w13_weight_packed")}
    known = {name: dict(expected(files, f"{name}.", rank, world)) for name in layers}
    wrong = [
        f"{name}.{parameter}"
        for name, layer in layers.items()
        for parameter, experts in known[name].items()
        if not torch.equal(getattr(layer, parameter), torch.stack([each.T for each in experts]))
    ]
    scheme = {type(layer.scheme).__name__ for layer in layers.values()}
    try:
        for layer in layers.values():
            layer.scheme.process_weights_after_loading(layer)
    except Repacked:
        held = None
    else:
        held = held_by(model)
    return {"layers": len(layers), "schemes": sorted(scheme), "wrong": wrong, "held": held}


def held_by(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    from slimx.adapters.sglang.weights.places import local_layout, weights_of

    layout, weights = local_layout(model), weights_of(model)
    assert not layout.uncovered, layout.uncovered
    return {name: (place.form, checksum_tensor(weights[name].data)) for name, place in layout.places.items()}


def main() -> None:
    absent.install()
    prepare(["--device", "cpu"])
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.set_default_dtype(torch.bfloat16)
    import sglang.srt.server_args  # noqa: F401  once for all: each entry is built in a fork
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as schemes

    schemes.gptq_marlin_moe_repack = _repack

    for entry in json.load(sys.stdin):
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            print(json.dumps(described(entry["path"], entry["rank"], entry["world"], entry["arguments"])))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{entry} could not be built")


if __name__ == "__main__":
    main()
