"""Base class of the configuration's sections, which refuses unknown keys, and types that bound their numbers.

The bounds are far beyond any run and keep arithmetic on a configuration finite: what `slimx plan` counts takes seconds,
and no product of two of them leaves 64 bits.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from slimx.config.rule import refuse
from slimx.errors import SlimxError

LARGEST = 2**31 - 1
"""Largest index into a tensor in int32."""
GPUS = 2**20
"""Most GPUs of one group of servers, all servers together."""
SERVER = 4096
"""Most ranks of one server."""

Size = Annotated[int, Field(gt=0, le=65_536)]
"""A number of ranks, or of what divides or carries them: parallel sizes, servers, nodes, GPUs, threads."""
Amount = Annotated[int, Field(gt=0, le=LARGEST)]
"""A number of tokens, prompts, steps or tries: at least one."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
"""A number of tokens, prompts, steps or tries, where 0 has a meaning of its own."""
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A deadline or an interval; a year at most."""
MOST = 1e12
"""Largest magnitude of a real number. It exceeds any ratio of probabilities that is formed
(slimx/algorithms/inputs.py): as a bound of ratios it is none."""
Positive = Annotated[float, Field(gt=0, le=MOST)]
"""A rate, temperature or bound that 0 would make meaningless; also MiB and GiB."""
Weight = Annotated[float, Field(ge=0, le=MOST)]
"""A coefficient; 0 turns its term off."""
Real = Annotated[float, Field(ge=-MOST, le=MOST)]
"""A number of either sign, such as a reward."""

ECHOED = 200
"""Characters of an input that a sentence repeats, at most."""

Label = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""A number that stands for something and is only compared."""


def expanded(path: str) -> str:
    """`path` with the home directory that a leading `~` or `~USER` stands for, as shells replace it. Raises ValueError
    for a user that there is not."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        user = found.partition("/")[0]
        raise ValueError(f"this machine has no user {user[1:]}; write ./{user} for a directory of that name")
    return found


PathText = Annotated[str, AfterValidator(expanded)]
"""Path of a file or directory."""


def shortened(value: object) -> str:
    """`value` as Python writes it, cut where a sentence could not hold it."""
    return reprlib.repr(value)


def echoed(text: str) -> str:
    """`text` as it was typed; of a longer one than `ECHOED` the beginning and its length."""
    return text if len(text) <= ECHOED else f"{text[: ECHOED // 2]}... ({len(text):,} characters)"


Faults = Iterator[tuple[str, str, str]]
"""Code, key and sentence of everything that is wrong."""


def refuse_faults(faults: Iterable[tuple[str, str, str]]) -> None:
    """Raise a Refusal of all `faults`, if there are any."""
    refuse([SlimxError(sentence, code=code, about=about) for code, about, sentence in faults])


class Section(BaseModel):
    """A section refuses keys that it does not know, infinities and NaN, and all `_faults`. The docstring under a field
    describes its key (docs/configuration.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def _faults(self) -> Faults:
        """Yields everything that is wrong in the section alone."""
        yield from ()

    @model_validator(mode="after")
    def _faultless(self) -> Self:
        refuse_faults(self._faults())
        return self


class Objective(Section):
    """An objective of section algorithm without parameters, or a user's hook."""

    demonstrated: ClassVar[bool] = False
    """True if it learns from whole answers, which may be those of prompts: it needs neither engines nor rewards."""
    scores: ClassVar[bool] = False
    """True if the model has a score in the place of logits."""
    whole_step: ClassVar[bool] = False
    """True if `finish_advantages` has to see the rows of the whole step."""
    kind: str
    """Name, or the dotted path of a hook."""

    def __str__(self) -> str:
        return self.kind

    def narrow[O: Objective](self, record: type[O]) -> O:
        """Returns the same objective, typed as `record`. Raises TypeError if it is not an instance of `record`."""
        if not isinstance(self, record):
            raise TypeError(f"objective {self.kind} is a {type(self).__name__}, not a {record.__name__}")
        return self
