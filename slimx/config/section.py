"""Base class of the configuration's sections, which refuses unknown keys, and types that bound their numbers.

The bounds are far beyond any real run. They keep arithmetic on a configuration finite: `slimx plan` takes seconds, and
the product of two bounds fits in 64 bits.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from slimx.config.rule import refuse
from slimx.errors import SlimxError

LARGEST = 2**31 - 1
"""Largest int32 index into a tensor."""
GPUS = 2**20
"""Maximum number of GPUs in one group of servers."""
SERVER = 4096
"""Maximum number of ranks of one server."""

Size = Annotated[int, Field(gt=0, le=65_536)]
"""A number of ranks, or a parallel size, or a number of servers, nodes, GPUs or threads."""
Amount = Annotated[int, Field(gt=0, le=LARGEST)]
"""A number of tokens, prompts, steps or attempts, at least 1."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
"""A number of tokens, prompts, steps or attempts, where 0 has a special meaning."""
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A deadline or an interval, at most a year."""
MOST = 1e12
"""Largest magnitude of a real number. It exceeds every ratio of probabilities (slimx/algorithms/inputs.py), and is no
constraint as a bound of ratios."""
Positive = Annotated[float, Field(gt=0, le=MOST)]
"""A rate, temperature or bound that cannot be 0, or an amount of memory in MiB or GiB."""
Weight = Annotated[float, Field(ge=0, le=MOST)]
"""A coefficient; 0 turns its term off."""
Real = Annotated[float, Field(ge=-MOST, le=MOST)]
"""A number of either sign, such as a reward."""

Options = dict[str, Any]
"""Keys and values that are passed on to a hook or a library."""
ECHOED = 200
"""Maximum number of characters of an input that a message repeats."""

Label = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""An integer that is only compared for equality."""


def expanded(path: str) -> str:
    """Expands a leading `~` or `~USER` to the home directory, as shells do. Raises ValueError for an unknown user."""
    expansion = os.path.expanduser(path)
    if expansion.startswith("~"):
        user = expansion.partition("/")[0]
        raise ValueError(f"this machine has no user {user[1:]}; write ./{user} for a directory of that name")
    return expansion


PathText = Annotated[str, AfterValidator(expanded)]
"""Path of a file or directory."""


def shortened(value: object) -> str:
    """Returns the `repr` of `value`, abbreviated to fit in a message."""
    return reprlib.repr(value)


def echoed(text: str) -> str:
    """Returns `text`; if it is longer than `ECHOED`, its beginning and its length."""
    return text if len(text) <= ECHOED else f"{text[: ECHOED // 2]}... ({len(text):,} characters)"


Faults = Iterator[tuple[str, str, str]]
"""Code, key and sentence of each fault."""


def refuse_faults(faults: Iterable[tuple[str, str, str]]) -> None:
    """Raises Refusal with all `faults`, if there are any."""
    refuse([SlimxError(sentence, code=code, about=about) for code, about, sentence in faults])


class Section(BaseModel):
    """A section of the configuration. It refuses unknown keys, infinities and NaN, and all `_faults`. The docstring of
    a field describes its key in docs/configuration.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def _faults(self) -> Faults:
        """Yields the faults that can be found within the section."""
        yield from ()

    @model_validator(mode="after")
    def _faultless(self) -> Self:
        refuse_faults(self._faults())
        return self


class Objective(Section):
    """A loss or estimator of section algorithm without parameters, or a hook of the user."""

    demonstrated: ClassVar[bool] = False
    """True if it learns from demonstrated answers, which prompts may have: it needs neither engines nor rewards."""
    scores: ClassVar[bool] = False
    """True if the model outputs a score instead of logits."""
    whole_step: ClassVar[bool] = False
    """True if `finish_advantages` needs the rows of the whole step."""
    kind: str
    """Name, or the dotted path of a hook."""

    def __str__(self) -> str:
        return self.kind

    def narrow[O: Objective](self, record: type[O]) -> O:
        """Returns the same objective, typed as `record`. Raises TypeError if it is not an instance of `record`."""
        if not isinstance(self, record):
            raise TypeError(f"objective {self.kind} is a {type(self).__name__}, not a {record.__name__}")
        return self
