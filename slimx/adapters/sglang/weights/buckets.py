"""Buckets as one rank finds them: mapped where they are in host memory, copied where they are in a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slimx.reshard.packed import ON_DEVICE
from slimx.reshard.transports.device import fetch
from slimx.reshard.transports.memory import open_memory


def open_bucket(
    path: str, size: int, entries: Sequence[dict[str, Any]], device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.device | None]:
    """The tensors of `entries` in the bucket of `size` bytes at `path`, and the GPU that they are on, if any.

    From host memory: views that keep the mapping alive and see what its owner writes. From a GPU: a copy on `device`,
    the rank's own, which nobody else can change; the owner may use its memory again.
    """
    if not entries:  # a rank that has no share of a bucket does not even open it
        return {}, None
    if not path.startswith(ON_DEVICE):
        memory = open_memory(path, size, private=True)
        return {entry["name"]: _view(memory, entry, 0) for entry in entries}, None
    start = min(entry["offset"] for entry in entries)
    stop = max(entry["offset"] + entry["nbytes"] for entry in entries)
    memory = fetch(path, start, stop, device)
    return {entry["name"]: _view(memory, entry, start) for entry in entries}, device


def _view(memory: torch.Tensor, entry: dict[str, Any], start: int) -> torch.Tensor:
    """The tensor that `entry` describes in `memory`, uint8 [bytes], which begins with the bucket's byte `start`."""
    offset = entry["offset"] - start
    run = memory[offset : offset + entry["nbytes"]]
    return run.view(getattr(torch, entry["dtype"])).view(entry["shape"])
