"""Buckets as one rank finds them, mapped where they are in host memory, copied where they are in a GPU's, and the open
publication to which they belong."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slimx.adapters.sglang.weights.places import Destination, Layout
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import ON_DEVICE
from slimx.reshard.parties import Staging
from slimx.reshard.transports.device import fetch
from slimx.reshard.transports.memory import open_memory


@dataclass(slots=True)
class Staged:
    """One tensor whose bytes are proven."""

    view: torch.Tensor
    """[shape], in the publisher's memory; of a bucket on a GPU, in this rank's own (`buckets`)."""
    share: int
    """The share of this rank's part in the tensor's checksum."""


@dataclass(slots=True)
class OpenPublication:
    """The publication that is open on this rank."""

    manifest: Manifest
    staging: Staging
    """"model": nothing is copied before everything is staged. "bucket": each load copies what is staged by then."""
    layout: Layout
    taken: set[str] = field(default_factory=set)
    """Names that came, those for other ranks among them."""
    waiting: int = 0
    """Buckets staged since the last load. A rank may have no tensor in them."""
    staged: dict[str, Staged] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    """Tensors that were copied -> share that the model should hold. Where adapters come alone, the base's are there
    from the beginning."""
    verified: bool = False

    @property
    def missing(self) -> list[str]:
        """Tensors that this rank needs and that are neither staged nor loaded."""
        return [name for name in self.layout.held if name not in self.staged and name not in self.loaded]

    def ready(self) -> dict[str, Staged]:
        """Returns the staged tensors that can be copied: those whose partners in the model's loader are staged, too."""
        return {name: staged for name, staged in self.staged.items() if self._complete(name)}

    def _complete(self, name: str) -> bool:
        return all(partner in self.staged for partner in self.layout.together.get(name, ()))


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


def check_entry(
    entry: dict[str, Any], places: Mapping[str, Destination], taken: Collection[str], bucket: int, size: int
) -> None:
    """Refuse, before a byte is read, what the model could not take. `taken`: names that came before."""
    name = entry["name"]
    place = places.get(name)
    if place is None:
        close = difflib.get_close_matches(name, list(places), n=1)
        nearest = f"the nearest that it takes is {close[0]}" if close else "it takes nothing of a similar name"
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is unknown to the model; {nearest}", code="receiver.tensor", about=name
        )
    offered = f"{entry['dtype']}:{','.join(map(str, entry['shape']))}"
    if offered != place.form:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is {offered}, the model loads {place.form}; convert it before "
            "publishing",
            code="receiver.form",
            about=name,
        )
    if name in taken:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} came already in this publication; send each tensor once",
            code="receiver.twice",
            about=name,
        )
    if entry["nbytes"] != place.nbytes or not 0 <= entry["offset"] <= size - place.nbytes:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} claims bytes {entry['offset']} + {entry['nbytes']} of {size}, "
            f"but needs {place.nbytes}",
            code="receiver.extent",
            about=name,
        )


def _view(memory: torch.Tensor, entry: dict[str, Any], start: int) -> torch.Tensor:
    """The tensor that `entry` describes in `memory`, uint8 [bytes], which begins with the bucket's byte `start`."""
    offset = entry["offset"] - start
    run = memory[offset : offset + entry["nbytes"]]
    return run.view(getattr(torch, entry["dtype"])).view(entry["shape"])
