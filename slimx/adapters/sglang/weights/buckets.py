"""Opens buckets of published tensors on one rank, and tracks the open publication to which they belong. Buckets in host
memory are mapped; buckets in GPU memory are copied."""

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
    """One received tensor whose checksum has been verified."""

    view: torch.Tensor
    """The tensor's values, in its full shape: a view of the publisher's host memory, or a copy on this rank's GPU if
    the bucket is in GPU memory."""
    share: int
    """Checksum share: the amount that this rank's part of the tensor contributes to the checksum of the full tensor."""


@dataclass(slots=True)
class OpenPublication:
    """A publication that this rank is receiving, with a record of the tensors that have arrived."""

    manifest: Manifest
    staging: Staging
    """Time at which staged tensors are copied into the model. "model": only after all tensors have been staged.
    "bucket": at each load request, which copies those staged so far."""
    layout: Layout
    taken: set[str] = field(default_factory=set)
    """Names of the tensors received so far, including those of which this rank stores no part."""
    waiting: int = 0
    """Number of buckets staged since tensors were last copied into the model, including buckets without tensors for
    this rank."""
    staged: dict[str, Staged] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    """Name of each tensor copied so far -> checksum share that the model should now have. Adapter-only publications
    start with the shares of the base weights."""
    verified: bool = False

    @property
    def key(self) -> tuple[str, int, int]:
        """Identity of the publication: policy, version and membership epoch."""
        return self.manifest.policy, self.manifest.version, self.manifest.membership_epoch

    @property
    def missing(self) -> list[str]:
        """Names of tensors that this rank stores, but has neither staged nor copied into the model."""
        return [name for name in self.layout.local if name not in self.staged and name not in self.loaded]

    def ready(self) -> dict[str, Staged]:
        """Returns the staged tensors that can be copied now: those for which all tensors that SGLang must load in the
        same call (`Layout.together`) are staged, too."""
        return {name: staged for name, staged in self.staged.items() if self._complete(name)}

    def _complete(self, name: str) -> bool:
        return all(partner in self.staged for partner in self.layout.together.get(name, ()))


class Slot(Protocol):
    """Memory for one policy's LoRA adapters in a server that applies adapters to shared base weights."""

    shares: dict[str, int] | None
    """Name of each tensor that the last publication copied into this slot -> checksum share that the slot should now
    have; None before the first publication."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the slot's tensors, keyed by the names under which `place` records them in a layout."""

    def place(self, layout: Layout) -> None:
        """Adds to `layout` the location in this slot of each published adapter tensor. A layer whose adapters cannot be
        located is recorded in `layout.uncovered`."""

    def write(self, layout: Layout, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the adapter tensors `named`, (name, complete tensor) pairs, to their locations in this slot."""


class Loads(Protocol):
    """The part of SGLang's model classes that copies checkpoint tensors into the model."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


def shares_of(tensors: Mapping[str, Staged]) -> dict[str, int]:
    """Returns the checksum share of each staged tensor, by name."""
    return {name: staged.share for name, staged in tensors.items()}


def open_bucket(
    path: str, size: int, entries: Sequence[Json], device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.device | None]:
    """Returns the tensors that `entries` describe in the bucket of `size` bytes at `path`, by name, and the GPU that
    stores them (None if they are in host memory or `entries` is empty).

    Tensors in host memory are views: they keep the mapping alive and change when the publisher writes to the bucket.
    Tensors in GPU memory are copied to `device`, this rank's GPU, so the publisher may reuse the bucket.
    """
    if not entries:  # a rank without tensors in the bucket does not open it
        return {}, None
    if not path.startswith(ON_DEVICE):
        memory = open_memory(path, size, private=True)
        return {entry["name"]: _view(memory, entry, 0) for entry in entries}, None
    start = min(entry["offset"] for entry in entries)
    stop = max(entry["offset"] + entry["nbytes"] for entry in entries)
    memory = fetch(path, start, stop, device)
    return {entry["name"]: _view(memory, entry, start) for entry in entries}, device


def base_shares(new: Manifest, layout: Layout, loaded: Mapping[str, int]) -> dict[str, int]:
    """Returns the checksum shares of all base weights of this rank, for the adapter-only publication `new`. `loaded`:
    shares of the tensors copied by earlier publications. Raises SlimxError if `loaded` lacks a base weight."""
    base = [name for name in layout.local if not is_adapter(name)]
    missing = [name for name in base if name not in loaded]
    if missing:
        raise SlimxError(
            f"{new} contains only adapters, but {len(missing)} base weights (the first is {missing[0]}) were never "
            "published to this server; publish the base weights first",
            code="receiver.no_base",
            about=missing[0],
        )
    return {name: loaded[name] for name in base}


def check_manifest(manifest: Manifest, staging: str) -> None:
    """Raises SlimxError if the manifest's quantization rule or `staging` is unknown to this server."""
    rules = ["none"]
    for number_format in all_formats().values():
        rules += number_format.RULES
    if manifest.rule not in rules:
        raise SlimxError(
            f"{manifest} has the unknown quantization rule {manifest.rule!r}; use one of {', '.join(rules)}",
            code="receiver.manifest",
            about="rule",
        )
    if staging not in get_args(Staging):
        raise SlimxError(
            f"{manifest} has the unknown staging mode {staging!r}; use one of {', '.join(get_args(Staging))}",
            code="receiver.manifest",
            about="staging",
        )


def check_entry(entry: Json, places: Mapping[str, Destination], taken: Collection[str], bucket: int, size: int) -> None:
    """Raises SlimxError if the model cannot load the tensor that `entry` describes; called before any of the tensor's
    bytes are read. `places`: location of each tensor that the model loads; `taken`: names of tensors already received;
    `bucket`: number of the bucket, for errors; `size`: size in bytes of the bucket."""
    name = entry["name"]
    place = places.get(name)
    if place is None:
        close = difflib.get_close_matches(name, list(places), n=1)
        nearest = (
            f"the most similar name in the model is {close[0]}"
            if close
            else "no tensor of the model has a similar name"
        )
        raise SlimxError(
            f"tensor {name} of bucket {bucket} is not in the model ({nearest}); use the model's tensor names",
            code="receiver.tensor",
            about=name,
        )
    offered = f"{entry['dtype']}:{','.join(map(str, entry['shape']))}"
    if offered != place.form:
        raise SlimxError(
            f"tensor {name} of bucket {bucket} has dtype and shape {offered}, but the model loads {place.form}; "
            "convert the tensor to the model's dtype and shape before publishing",
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
            f"tensor {name} of bucket {bucket} is declared with {entry['nbytes']} bytes at offset {entry['offset']}, "
            f"but the tensor has {place.nbytes} bytes and the bucket has {size}; declare its size, and a valid offset",
            code="receiver.extent",
            about=name,
        )


def _view(memory: torch.Tensor, entry: Json, start: int) -> torch.Tensor:
    """Returns a view of the tensor that `entry` describes. `memory`: the bucket's bytes from byte `start` on, uint8
    [bytes]."""
    offset = entry["offset"] - start
    data = memory[offset : offset + entry["nbytes"]]
    return data.view(getattr(torch, entry["dtype"])).view(entry["shape"])
