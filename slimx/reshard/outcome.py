"""Records of one publication: what became of it at each engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest


@dataclass(slots=True)
class EngineOutcome:
    """The outcome of one publication at one engine."""

    step: str = "begin"
    """The step that it did last."""
    tensors: int = 0
    """Tensors that it proved to hold; 0 unless all were."""
    error: SlimxError | None = None
    """Why it was quarantined."""


@dataclass(slots=True)
class Publication:
    """The record of one publication."""

    manifest: Manifest
    engines: dict[str, EngineOutcome] = field(default_factory=dict)
    tensors: int = 0
    """Tensors sent to each engine, and verified in each that is not lost."""
    nbytes: int = 0
    """Bytes sent to each engine."""
    buckets: int = 0
    wire: int | None = None
    """Bytes that travelled to all engines together; None: they were not counted."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: check, begin, gather, stage, pause, load, verify, commit (with resume and admission), total. A stage
    lasts as long as its slowest engine; gather and stage overlap, so that their sum can exceed the total."""

    @property
    def lost(self) -> list[str]:
        """Names of the engines that were quarantined."""
        return [name for name, outcome in self.engines.items() if outcome.error is not None]
