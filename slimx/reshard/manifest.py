"""Identity of a publication (version, policy, encoding and membership) and the record of its outcome at each engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Literal, get_args

from slimx.errors import SlimxError
from slimx.json_types import Json

Encoding = Literal["hf", "local", "adapters"]
ADAPTER_PREFIX = "base_model.model."
"""Prefix of the names that PEFT gives to an adapter's tensors."""


def is_adapter(name: str) -> bool:
    """Returns True if `name` is that of an adapter's tensor."""
    return name.startswith(ADAPTER_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Identity of a publication. Sent when it begins; engines reject messages of any other publication."""

    policy: str
    """Name of the policy whose weights are published."""
    version: int
    """Version of the weights, from 0, that tokens carry after the commit."""
    encoding: Encoding = "hf"
    """"hf": tensors with Hugging Face names, the same bytes for every rank. "local": each engine rank's own bytes, with
    names and shapes of its parameters. "adapters": A and B of low-rank adapters with PEFT's names, in addition to
    weights from an earlier "hf" publication."""
    rule: str = "none"
    """Quantization rule (docs/numerics.md); "none" without quantization."""
    trainer_step: int
    """Number of optimizer steps that produced these weights."""
    membership_epoch: int
    """Membership epoch in which this publication began; it tells apart two publications of one version."""

    def __post_init__(self) -> None:
        if self.encoding not in get_args(Encoding):
            known = ", ".join(get_args(Encoding))
            raise SlimxError(
                f"manifest: encoding is {self.encoding!r}, but must be one of {known}",
                code="manifest.value",
                about="encoding",
            )

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Json) -> Manifest:
        """Returns the manifest that `to_json` wrote. Raises SlimxError for a missing or unknown key."""
        unmatched = sorted(values.keys() ^ {field.name for field in fields(cls)})
        if unmatched:
            key = unmatched[0]
            problem = "is unknown" if key in values else "is missing"
            raise SlimxError(
                f"manifest: {key} {problem}; the other side runs a different version of slimx: install the same one on "
                "both",
                code="manifest.key",
                about=key,
            )
        return cls(**values)

    def __str__(self) -> str:
        return f"version {self.version} of {self.policy} (epoch {self.membership_epoch})"


@dataclass(slots=True)
class EngineOutcome:
    """Outcome of one publication at one engine."""

    step: str = "begin"
    """The last step that the engine performed."""
    tensors: int = 0
    """Number of tensors that the engine verified; 0 unless it verified all."""
    error: SlimxError | None = None
    """Reason of the quarantine."""


@dataclass(slots=True)
class Publication:
    """Record of one publication."""

    manifest: Manifest
    engines: dict[str, EngineOutcome] = field(default_factory=dict)
    tensors: int = 0
    """Number of tensors sent to each engine and verified by each that is not lost."""
    nbytes: int = 0
    """Bytes sent to each engine."""
    buckets: int = 0
    wire: int | None = None
    """Bytes sent over the network to all engines together; None if not counted."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: check, begin, gather, stage, pause, load, verify, commit (with resume and admission), total. A
    stage lasts as long as in its slowest engine; gather and stage overlap, so the sum can exceed the total."""

    @property
    def lost(self) -> list[str]:
        """Names of the quarantined engines."""
        return [name for name, outcome in self.engines.items() if outcome.error is not None]
