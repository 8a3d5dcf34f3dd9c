"""The content of a trainer's checkpoint as text, and what megatron-core 0.16.1 wrote of the same models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
_STATE = "optimizer.state."


def written_by_0_16(model: str) -> list[str]:
    """Returns `saved_tensors` of a checkpoint that slimx wrote with megatron-core 0.16.1 and torch 2.13.0."""
    return (GOLDEN / f"{model}.txt").read_text().splitlines()


def saved_tensors(path: Path) -> list[str]:
    """Returns a line for each tensor of the model (name, type, shape, and the states of it that the optimizer saved in
    the same type and shape), for each other tensor, and for each object (its name, without the part of a rank)."""
    found = {
        name: _described(entry) for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items()
    }
    states = sorted({name.removeprefix(_STATE).partition(".")[0] for name in found if name.startswith(_STATE)})
    kept = {
        name: [state for state in states if found.get(f"{_STATE}{state}.{name}") == what]
        for name, what in found.items()
        if what and not name.startswith(_STATE)
    }
    described = {f"{_STATE}{state}.{name}" for name, saved in kept.items() for state in saved}
    return sorted(
        {
            " ".join([name.partition("/shard_")[0], *what, *kept.get(name, [])])
            for name, what in found.items()
            if name not in described
        }
    )


def _described(entry: Any) -> tuple[str, ...]:
    """Returns type and shape of a tensor, nothing of an object."""
    if not hasattr(entry, "size"):
        return ()
    return str(entry.properties.dtype).removeprefix("torch."), "x".join(map(str, entry.size))
