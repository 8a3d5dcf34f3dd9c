"""The publication that is open on one rank: what has come of it, and what was copied."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from slimx.adapters.sglang.weights.places import Layout
from slimx.reshard.manifest import Manifest
from slimx.reshard.parties import Staging


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
