"""Identity of a publication (policy, version, encoding, membership epoch) and the record of its outcome on each
engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Literal, get_args

from slimx.errors import SlimxError
from slimx.json_types import Json

Encoding = Literal["hf", "local", "adapters"]
ADAPTER_PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of an adapter's tensors."""


def is_adapter(name: str) -> bool:
    """Returns True if `name` has PEFT's prefix, which means that the tensor belongs to a LoRA adapter instead of the
    base model."""
    return name.startswith(ADAPTER_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Identity of a publication, sent to every engine when the publication begins.

    From then on the engine rejects messages of any other publication."""

    policy: str
    """Name of the policy whose weights are published."""
    version: int
    """Version of the weights, from 0. After the commit, engines label every sampled token with it."""
    encoding: Encoding = "hf"
    """Names and layout of the published tensors.

    "hf": Hugging Face names and shapes; every engine rank receives the same bytes. "local": each engine rank receives
    its own bytes, with the names and shapes of its parameters. "adapters": only the matrices A and B of LoRA adapters,
    with PEFT's names; the base weights are those of an earlier "hf" publication."""
    rule: str = "none"
    """Rule that computes the scales of quantized weights (docs/numerics.md); "none" without quantization."""
    trainer_step: int
    """Number of optimizer steps that produced these weights."""
    membership_epoch: int
    """Membership epoch in which this publication began; the epoch distinguishes two attempts to publish the same
    version."""

    def __post_init__(self) -> None:
        if self.encoding not in get_args(Encoding):
            raise SlimxError(
                f"the manifest of version {self.version} has the unknown encoding {self.encoding!r}; use one of "
                f"{', '.join(get_args(Encoding))}",
                code="manifest.value",
                about="encoding",
            )

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Json) -> Manifest:
        """Returns the manifest that `to_json` encoded as `values`. Raises SlimxError for a missing or unknown key."""
        unmatched = sorted(values.keys() ^ {field.name for field in fields(cls)})
        if unmatched:
            key = unmatched[0]
            problem = "is unknown" if key in values else "is missing"
            raise SlimxError(
                f"the key {key} of the manifest {problem}, because trainers and engines run different versions of "
                "slimx; install the same slimx version on every machine",
                code="manifest.key",
                about=key,
            )
        return cls(**values)

    def __str__(self) -> str:
        return f"version {self.version} of {self.policy} (epoch {self.membership_epoch})"


@dataclass(slots=True)
class EngineOutcome:
    """Progress and result of one publication on one engine."""

    step: str = "begin"
    """Last step that was started on the engine, such as "begin", "stage" or "commit"."""
    tensors: int = 0
    """Number of tensors that the engine verified; 0 unless it verified all of them."""
    error: SlimxError | None = None
    """Error that caused the engine to be quarantined; None if the engine received the version."""


@dataclass(slots=True)
class Publication:
    """Record of one publication: its manifest, the outcome on each engine, amounts of data and durations."""

    manifest: Manifest
    engines: dict[str, EngineOutcome] = field(default_factory=dict)
    tensors: int = 0
    """Number of tensors sent to each engine; every engine that was not quarantined has verified all of them."""
    nbytes: int = 0
    """Total size in bytes of the tensors sent to each engine."""
    buckets: int = 0
    wire: int | None = None
    """Bytes sent over the network to all engines together; None if the transport does not count them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each stage in seconds: check, begin, gather, stage, pause, load, verify, commit (including resume and
    admission), and total.

    A stage ends when the slowest engine has finished it. Gather and stage overlap, so the sum can exceed the total."""

    @property
    def lost(self) -> list[str]:
        """Names of the engines that were quarantined during the publication."""
        return [name for name, outcome in self.engines.items() if outcome.error is not None]
