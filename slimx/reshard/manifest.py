"""One publication: its identity, that is version and policy, their form, and the membership it began under; and the
record of what became of it at each engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from slimx.errors import SlimxError

Encoding = Literal["hf", "local", "adapters"]
ADAPTER_PREFIX = "base_model.model."
"""Beginning of the name that PEFT gives to every tensor of an adapter."""


def is_adapter(name: str) -> bool:
    """True for the name of a tensor of an adapter, which no weight has."""
    return name.startswith(ADAPTER_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Travels with the begin of a publication; engines keep it, and refuse whatever belongs to another one."""

    policy: str
    """Name of the policy whose weights these are."""
    version: int
    """From 0; the version that tokens carry once this is committed."""
    encoding: Encoding = "hf"
    """"hf": tensors with Hugging Face names, the same bytes for every rank. "local": each engine rank's own bytes,
    named and shaped as the parameters that it holds. "adapters": A and B of low-rank adapters in PEFT's names, beside
    weights that an earlier publication of "hf" brought."""
    rule: str = "none"
    """Rule by which values were quantised (docs/numerics.md); "none" where they were not."""
    trainer_step: int
    """Optimizer steps behind these weights."""
    membership_epoch: int
    """The membership under which this publication began: two publications of one version differ in it."""

    def __post_init__(self) -> None:
        if self.encoding not in get_args(Encoding):
            known = ", ".join(get_args(Encoding))
            raise SlimxError(
                f"manifest: encoding is {self.encoding!r}; it is one of {known}",
                code="manifest.value",
                about="encoding",
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Manifest:
        """The manifest that `to_json` wrote; a missing or unknown key is an error."""
        if odd := sorted(values.keys() ^ {field.name for field in fields(cls)}):
            problem = "is unknown" if odd[0] in values else "is missing"
            raise SlimxError(
                f"manifest: {odd[0]} {problem}; the other side runs another version of slimx",
                code="manifest.key",
                about=odd[0],
            )
        return cls(**values)

    def __str__(self) -> str:
        return f"version {self.version} of {self.policy} (epoch {self.membership_epoch})"


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
