"""Base class of the configuration's sections, which refuses unknown keys, and bounded number types for their fields.

The bounds are far beyond any real run. They keep computations on a configuration finite: `slimx plan` finishes within
seconds, and the product of two bounded numbers fits in 64 bits.
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
"""Largest value of int32, and therefore the largest tensor index that kernels with int32 indices can address."""
GPUS = 2**20
"""Maximum number of GPUs in one group of engine servers."""
SERVER = 4096
"""Maximum number of ranks per engine server."""

Size = Annotated[int, Field(gt=0, le=65_536)]
"""A parallel size, or a number of ranks, servers, nodes, GPUs or threads."""
Amount = Annotated[int, Field(gt=0, le=LARGEST)]
"""A number of tokens, prompts, steps or attempts, at least 1."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
"""A number of tokens, prompts, steps or attempts, or 0 with a meaning that the field documents."""
Share = Annotated[float, Field(ge=0, le=1)]
TopP = Annotated[float, Field(gt=0, le=1)]
"""Probability mass of the candidates from which nucleus sampling draws."""
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A deadline or an interval in seconds, at most a year."""
MOST = 1e12
"""Largest magnitude of a floating-point setting. It exceeds every probability ratio (slimx/algorithms/inputs.py), so an
upper bound of this size never takes effect on ratios."""
Positive = Annotated[float, Field(gt=0, le=MOST)]
"""A number greater than 0: a rate, a temperature, a bound, or an amount of memory in MiB or GiB."""
Weight = Annotated[float, Field(ge=0, le=MOST)]
"""A non-negative number, such as the coefficient of a loss or reward term, which 0 disables."""
Real = Annotated[float, Field(ge=-MOST, le=MOST)]
"""A number that may be negative, such as a reward."""

Options = dict[str, Any]
"""Keyword arguments that are passed to a hook, or fields that are passed to a library."""
ECHOED = 200
"""Maximum number of characters of an input that an error message repeats in full."""

Label = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""An integer in prompt metadata, which is only compared for equality."""


def expanded(path: str) -> str:
    """Expands a leading `~` or `~USER` of a path to the home directory, as a shell does. Raises ValueError if the user
    is unknown."""
    expansion = os.path.expanduser(path)
    if expansion.startswith("~"):
        user = expansion.partition("/")[0]
        raise ValueError(f"this machine has no user {user[1:]}; write ./{user} for a directory of that name")
    return expansion


PathText = Annotated[str, AfterValidator(expanded)]
"""Path of a file or directory; a leading `~` is expanded."""


def shortened(value: object) -> str:
    """Returns the `repr` of `value`, abbreviated to fit in a message."""
    return reprlib.repr(value)


def echoed(text: str) -> str:
    """Returns `text`; if it is longer than `ECHOED` characters, only its beginning and its length."""
    return text if len(text) <= ECHOED else f"{text[: ECHOED // 2]}... ({len(text):,} characters)"


Faults = Iterator[tuple[str, str, str]]
"""Iterator over faults: error code, dotted key and message of each."""


def refuse_faults(faults: Iterable[tuple[str, str, str]]) -> None:
    """Raises a Refusal that lists all `faults` (code, key and message of each); returns if there are none."""
    refuse([SlimxError(message, code=code, about=key) for code, key, message in faults])


class Section(BaseModel):
    """Base class of the configuration's sections. Unknown keys, infinities and NaN are errors, and so is every fault
    that `_faults` yields. The docstring of a field is its description in docs/configuration.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def _faults(self) -> Faults:
        """Yields the code, key and message of each fault that can be found in this section alone. Subclasses override
        this method."""
        yield from ()

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise SlimxError(
                f"{name} of {type(self).__name__} cannot be set, because a configuration does not change; create "
                f'another with slimx.load_config(config, {{"section.{name}": ...}})',
                code="config.frozen",
                about=name,
            )
        super().__setattr__(name, value)

    @model_validator(mode="after")
    def _faultless(self) -> Self:
        refuse_faults(self._faults())
        return self


class Objective(Section):
    """Kind of loss or advantage estimator, as configured in section `algorithm`. This class is used for kinds without
    parameters and for the user's hooks; subclasses add parameters."""

    demonstrated: ClassVar[bool] = False
    """True if the loss or estimator uses demonstrated answers that the prompts contain, and therefore needs neither
    engines nor rewards."""
    scores: ClassVar[bool] = False
    """True if the trained model is a reward model, whose output is a score instead of logits."""
    whole_step: ClassVar[bool] = False
    """True if this loss or estimator is computed from all trajectories of a step together, by `finish_advantages`,
    before training."""
    kind: str
    """Name of a built-in kind, or the dotted path of a hook."""

    def __str__(self) -> str:
        return self.kind

    def narrow[O: Objective](self, record: type[O]) -> O:
        """Returns this objective, typed as its subclass `record`. Raises TypeError if it is not an instance of
        `record`."""
        if not isinstance(self, record):
            raise TypeError(f"objective {self.kind} is of class {type(self).__name__}, not {record.__name__}")
        return self
