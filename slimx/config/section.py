"""What every section of the configuration shares: bounds of its numbers, and that unknown keys are refused.

The bounds are far beyond any run and keep arithmetic on a configuration finite: what `slimx plan` counts takes seconds,
and no product of two of them leaves 64 bits.
"""

from __future__ import annotations

import reprlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**31 - 1
"""What an index into a tensor may be in int32."""
GPUS = 2**20
"""Of one group of servers, all together."""
SERVER = 4096
"""Ranks of one server."""

Size = Annotated[int, Field(gt=0, le=65_536)]
"""Ranks, and what divides or carries them: parallel sizes, servers, nodes, GPUs, threads."""
Amount = Annotated[int, Field(gt=0, le=LARGEST)]
"""Tokens, prompts, steps, tries: at least one."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
"""The same, where 0 has a meaning of its own."""
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A deadline or an interval; a year at most."""
MOST = 1e12
"""Also more than any ratio of probabilities that is formed (slimx/algorithms/ratios.py): as a bound it is none."""
Positive = Annotated[float, Field(gt=0, le=MOST)]
"""A rate, temperature or bound that 0 would make meaningless; also MiB and GiB."""
Weight = Annotated[float, Field(ge=0, le=MOST)]
"""A coefficient; 0 turns its term off."""
Real = Annotated[float, Field(ge=-MOST, le=MOST)]
"""A number of either sign, such as a reward."""

Label = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""A number that stands for something and is only compared."""


def shortened(value: object) -> str:
    """`value` as Python writes it, cut where a sentence could not hold it."""
    return reprlib.repr(value)


class Section(BaseModel):
    """A section refuses keys that it does not know, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
