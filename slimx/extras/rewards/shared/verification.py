"""math-verify's functions parse and verify, with a reliable limit of CPU time. The library's warning for each response
that times out, which contains the full response, is disabled."""

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
"""Interval in CPU seconds at which the alarm repeats after the time limit."""


def parse(text: str, *, seconds: float | None) -> list[Any]:
    """Returns the values that `text` may mean; [] if it cannot be parsed within `seconds` of CPU time (None: no
    limit)."""
    return in_time(lambda: math_verify.parse(text, parsing_timeout=None), seconds) or []


def verify(gold: Sequence[Any], predicted: Sequence[Any], *, seconds: float | None) -> bool:
    """Returns True if the values in `gold` and `predicted` are equal; False if they are not, or cannot be compared
    within `seconds` of CPU time (None: no limit)."""
    return in_time(lambda: math_verify.verify([*gold], [*predicted], timeout_seconds=None), seconds) or False


def in_time[T](compute: Callable[[], T], seconds: float | None) -> T | None:
    """Returns the result of `compute`, or None if it takes more than `seconds` of CPU time (None: no limit) or recurses
    too deeply.

    A limit works only in the main thread. It applies to CPU time, because a wall-clock limit would reject correct
    responses on a busy machine. Unlike math-verify's alarm, this one repeats, because Python drops an exception that is
    raised in a finalizer."""
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
        signal.setitimer(signal.ITIMER_PROF, 0)  # the alarm may have fired before the call above
        signal.signal(signal.SIGPROF, before)
