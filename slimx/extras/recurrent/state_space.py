"""Hybrid decoders of Mamba-2 layers (Dao and Gu, 2405.21060), attention, MLPs and experts: their pattern, and the sizes
of a Mamba-2 layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

Kind = Literal["M", "*", "-", "E"]
"""Mamba-2, attention, MLP, experts."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Sizes of a Mamba-2 layer. `heads // groups` consecutive heads share one B and C."""

    hidden: int
    heads: int
    head: int
    """Dimension of a head."""
    groups: int
    state: int
    """Dimension of B and C."""
    width: int = 4
    """Width of the convolution, in tokens; megatron-core's mixer supports no other."""

    @classmethod
    def of(cls, transformer: Mapping[str, Any]) -> Self:
        """Returns the sizes from fields of megatron-core's TransformerConfig."""
        return cls(
            hidden=transformer["hidden_size"],
            heads=transformer["mamba_num_heads"],
            head=transformer["mamba_head_dim"],
            groups=transformer["mamba_num_groups"],
            state=transformer["mamba_state_dim"],
        )

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads of a Mamba-2 layer cannot share {self.groups} groups")

    @property
    def inner(self) -> int:
        """Channels of all heads: of the input x, of the gate z, and of the output."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Rows of all B, and of all C."""
        return self.groups * self.state

    @property
    def mixed(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.keys

    def rule(self, chunk: int) -> int:
        """Counts products of the state-space rule per token, in chunks of `chunk` tokens (2405.21060, section 6): per
        group C with the chunk's B, per head the scores with the chunk's inputs, and writing and reading the state."""
        return chunk * (self.keys + self.inner) + 2 * self.inner * self.state

    @property
    def projected(self) -> int:
        """Rows of the input projection: z, x, B, C, and a step per head."""
        return self.inner + self.mixed + self.heads
