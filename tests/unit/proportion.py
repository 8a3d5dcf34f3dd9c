"""Tells a function whose time grows faster than its input from the noise of a loaded machine."""

from __future__ import annotations

from collections.abc import Callable

TIMES = 4


def grows(short: Callable[[], float], long: Callable[[], float], most: float, floor: float) -> bool:
    """Returns whether `long` takes `most` times the seconds of `short`, or more, in each of four measurements.

    `short` and `long` measure, and return, CPU seconds; those below `floor` count as `floor`. A loaded machine
    lengthens either of them."""
    for _ in range(TIMES):
        seconds = long()
        if seconds < most * floor or seconds < most * max(short(), floor):
            return False
    return True
