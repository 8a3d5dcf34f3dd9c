"""math-verify's two functions with a reliable CPU time limit, and without its warning, with the full text, for each
response that times out."""

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
    """Returns the values that a text can mean; none if it cannot be parsed in time."""
    return in_time(lambda: math_verify.parse(text, parsing_timeout=None), seconds) or []


def verify(gold: Sequence[Any], predicted: Sequence[Any], *, seconds: float | None) -> bool:
    """Returns True if two values are equal, False if not or if they cannot be compared in time."""
    return in_time(lambda: math_verify.verify([*gold], [*predicted], timeout_seconds=None), seconds) or False


def in_time[T](compute: Callable[[], T], seconds: float | None) -> T | None:
    """Returns the result of `compute`, or None if it takes more than `seconds` of CPU time or recurses too deep.

    Needs the main thread, unless `seconds` is None (no limit). CPU time, because wall-clock time would fail correct
    responses on a busy machine. The alarm repeats, unlike the library's: Python drops an exception raised in a
    finalizer.
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
        signal.setitimer(signal.ITIMER_PROF, 0)  # the alarm may have fired before the same call above
        signal.signal(signal.SIGPROF, before)
