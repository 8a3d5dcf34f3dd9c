"""Buckets on one rank, mapped from host memory or copied from GPU memory, and the open publication to which they
belong."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, get_args

import torch

from slimx.adapters.sglang.weights.places import Destination, Layout
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.number_formats import all_formats
from slimx.reshard.manifest import Manifest, is_adapter
from slimx.reshard.packed import ON_DEVICE
from slimx.reshard.parties import Staging
from slimx.reshard.transports.device import fetch
from slimx.reshard.transports.memory import open_memory


@dataclass(slots=True)
class Staged:
    """One verified tensor."""

    view: torch.Tensor
    """[shape], in the publisher's memory; for a bucket on a GPU, in memory of this rank."""
    share: int
    """Contribution of this rank's part to the tensor's checksum."""


@dataclass(slots=True)
class OpenPublication:
    """The open publication of this rank."""

    manifest: Manifest
    staging: Staging
    """"model": nothing is copied before everything is staged. "bucket": each load copies all staged tensors."""
    layout: Layout
    taken: set[str] = field(default_factory=set)
    """Names of received tensors, including those for other ranks."""
    waiting: int = 0
    """Buckets staged since the last load; they may contain no tensor of this rank."""
    staged: dict[str, Staged] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    """Copied tensors -> share that the model should hold. Adapter-only publications begin with those of the base."""
    verified: bool = False

    @property
    def key(self) -> tuple[str, int, int]:
        """Policy, version and membership epoch."""
        return self.manifest.policy, self.manifest.version, self.manifest.membership_epoch

    @property
    def missing(self) -> list[str]:
        """Tensors that this rank needs and has neither staged nor loaded."""
        return [name for name in self.layout.local if name not in self.staged and name not in self.loaded]

    def ready(self) -> dict[str, Staged]:
        """Returns the staged tensors that can be copied: those whose partners in the model's loader are staged too."""
        return {name: staged for name, staged in self.staged.items() if self._complete(name)}

    def _complete(self, name: str) -> bool:
        return all(partner in self.staged for partner in self.layout.together.get(name, ()))


class Slot(Protocol):
    """The adapters of one policy in addition to this rank's weights."""

    shares: dict[str, int] | None
    """Tensors copied by the last publication to this slot -> share that the slot should contain; None before the
    first."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the slot's memory by the names under which `place` records it."""
        ...

    def place(self, layout: Layout) -> None:
        """Records the location of published tensors; a layer that no row explains is uncovered."""
        ...

    def write(self, layout: Layout, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies published tensors into the slot."""
        ...


class Loads(Protocol):
    """A model of SGLang."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


def shares_of(tensors: Mapping[str, Staged]) -> dict[str, int]:
    """Returns name -> share of each tensor."""
    return {name: staged.share for name, staged in tensors.items()}


def open_bucket(
    path: str, size: int, entries: Sequence[Json], device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.device | None]:
    """Returns the tensors of `entries` in the bucket of `size` bytes at `path`, and the GPU that holds them, if any.

    From host memory: views that keep the mapping alive and see writes of its owner. From a GPU: a private copy on
    `device`, this rank's GPU; the owner may reuse its memory.
    """
    if not entries:  # a rank without a part does not open the bucket
        return {}, None
    if not path.startswith(ON_DEVICE):
        memory = open_memory(path, size, private=True)
        return {entry["name"]: _view(memory, entry, 0) for entry in entries}, None
    start = min(entry["offset"] for entry in entries)
    stop = max(entry["offset"] + entry["nbytes"] for entry in entries)
    memory = fetch(path, start, stop, device)
    return {entry["name"]: _view(memory, entry, start) for entry in entries}, device


def base_shares(new: Manifest, layout: Layout, loaded: Mapping[str, int]) -> dict[str, int]:
    """Returns the shares of all base weights among `loaded`. Raises SlimxError if some are missing."""
    base = [name for name in layout.local if not is_adapter(name)]
    missing = [name for name in base if name not in loaded]
    if missing:
        raise SlimxError(
            f"{new} contains only adapters, but {len(missing)} base weights were never published to this server, "
            f"first {missing[0]}; publish all weights first",
            code="receiver.no_base",
            about=missing[0],
        )
    return {name: loaded[name] for name in base}


def check_manifest(manifest: Manifest, staging: str) -> None:
    """Raises SlimxError for an unknown rule or kind of staging."""
    rules = ["none"]
    for number_format in all_formats().values():
        rules += number_format.RULES
    if manifest.rule not in rules:
        raise SlimxError(
            f"{manifest} has rule {manifest.rule!r}; rules are {', '.join(rules)}",
            code="receiver.manifest",
            about="rule",
        )
    if staging not in get_args(Staging):
        raise SlimxError(
            f"{manifest} is staged by {staging!r}; it is one of {', '.join(get_args(Staging))}",
            code="receiver.manifest",
            about="staging",
        )


def check_entry(entry: Json, places: Mapping[str, Destination], taken: Collection[str], bucket: int, size: int) -> None:
    """Raises SlimxError for a tensor that the model cannot load, before a byte is read. `taken`: names received
    before."""
    name = entry["name"]
    place = places.get(name)
    if place is None:
        close = difflib.get_close_matches(name, list(places), n=1)
        nearest = f"the most similar known name is {close[0]}" if close else "it has no similar name"
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is unknown to the model; {nearest}", code="receiver.tensor", about=name
        )
    offered = f"{entry['dtype']}:{','.join(map(str, entry['shape']))}"
    if offered != place.form:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is {offered}, but the model loads {place.form}; convert it "
            "before publishing",
            code="receiver.form",
            about=name,
        )
    if name in taken:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} was already sent in this publication; send each tensor once",
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


def _view(memory: torch.Tensor, entry: Json, start: int) -> torch.Tensor:
    """Returns the tensor of `entry` in `memory`, uint8 [bytes], which starts at byte `start` of the bucket."""
    offset = entry["offset"] - start
    data = memory[offset : offset + entry["nbytes"]]
    return data.view(getattr(torch, entry["dtype"])).view(entry["shape"])
