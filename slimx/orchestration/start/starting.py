"""The line about a start of trainers and engines, and the one about its end with the seconds that it took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from slimx.cluster.connection import trained_ranks
from slimx.config.schema import Config


@dataclass(frozen=True, slots=True)
class Starting:
    """Parts of a run that are being started, together with Ray."""

    parts: str
    """Such as "2 trainers, 1 engine"."""
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, config: Config, *, trainers: bool = True) -> Starting:
        """Parts of `config`; `trainers`: whether the command has any."""
        ranks = sum(trained_ranks(own) for own in config.by_policy.values()) if trainers else 0
        engines = sum(group.started for own in config.by_policy.values() for group in own.rollout.served)
        counted = [(ranks, "trainer"), (engines, "engine")]
        return cls(", ".join(f"{count} {name}{'s' * (count > 1)}" for count, name in counted if count) or "Ray")

    @property
    def line(self) -> str:
        return f"starting {self.parts}"

    @property
    def ready(self) -> str:
        return f"{self.parts} ready after {time.monotonic() - self.since:.0f} s"
