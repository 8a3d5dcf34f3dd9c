"""Layer kinds of hybrid decoders, and the sizes of a Mamba-2 layer (Dao and Gu, 2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

Kind = Literal["M", "*", "-", "E"]
"""Kind of a layer in a hybrid decoder: M for Mamba-2, * for attention, - for an MLP, E for experts."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Sizes of a Mamba-2 layer. `heads // groups` consecutive heads share one B and one C."""

    hidden: int
    heads: int
    head: int
    """Number of dimensions of each head."""
    groups: int
    state: int
    """State size: the dimension of each group's B and C."""
    width: int = 4
    """Width of the convolution, in tokens; megatron-core's mixer supports only this width."""

    @classmethod
    def of(cls, transformer: Mapping[str, Any]) -> Self:
        """Returns the sizes that `transformer`, a mapping of megatron-core's TransformerConfig fields, specifies."""
        return cls(
            hidden=transformer["hidden_size"],
            heads=transformer["mamba_num_heads"],
            head=transformer["mamba_head_dim"],
            groups=transformer["mamba_num_groups"],
            state=transformer["mamba_state_dim"],
        )

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads of a Mamba-2 layer are not a multiple of {self.groups} groups")

    @property
    def inner(self) -> int:
        """Total number of channels over all heads, the same for the input x, the gate z and the output."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Number of projection rows for B in all groups, equal to the number for C."""
        return self.groups * self.state

    @property
    def mixed(self) -> int:
        """Number of input channels of the convolution: the channels of x, B and C."""
        return self.inner + 2 * self.keys

    def rule(self, chunk: int) -> int:
        """Returns the multiply-adds of the state-space rule per token, in chunks of `chunk` tokens (arXiv:2405.21060,
        section 6): for each group, C times the chunk's B; for each head, these products times the chunk's inputs, and
        the update and the read of the state."""
        return chunk * (self.keys + self.inner) + 2 * self.inner * self.state

    @property
    def projected(self) -> int:
        """Number of rows of the input projection: rows for z, x, B and C, and one row per head for the time step."""
        return self.inner + self.mixed + self.heads
