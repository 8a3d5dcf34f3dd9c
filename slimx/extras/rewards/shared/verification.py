"""math-verify's two functions with a bound of CPU time that holds, and without its warnings: one for each response that
is not read in time, all of it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import math_verify
from math_verify.errors import TimeoutException

logging.getLogger("math_verify").setLevel(logging.ERROR)

AGAIN_S = 1.0
"""CPU seconds between alarms after the first one."""


def parse(text: str, *, seconds: float | None) -> list[Any]:
    """Returns the values that a text can mean, none if it cannot be read in time."""
    return in_time(lambda: math_verify.parse(text, parsing_timeout=None), seconds) or []


def verify(gold: Sequence[Any], found: Sequence[Any], *, seconds: float | None) -> bool:
    """Returns True if two values are equal, False if they cannot be compared in time."""
    return in_time(lambda: math_verify.verify([*gold], [*found], timeout_seconds=None), seconds) or False


def in_time[T](compute: Callable[[], T], seconds: float | None) -> T | None:
    """Returns the result of `compute`, or None if it takes more CPU seconds of this process or recurses too deep.

    In the main thread only, except without a bound (None). Not seconds of the clock: on a busy machine a right response
    would earn nothing. The alarm repeats, unlike the library's own: Python drops an exception that strikes in a
    finaliser.
    """
    if seconds is None:
        return compute()

    def expire(signum: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutException

    before = signal.signal(signal.SIGPROF, expire)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)
        try:
            return compute()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (TimeoutException, RecursionError):
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the alarm may have struck before the same call above
        signal.signal(signal.SIGPROF, before)
