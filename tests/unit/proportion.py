"""Whether a function's time grows faster than its input, on a machine where others are at work."""

from __future__ import annotations

from collections.abc import Callable

TIMES = 4


def grows(short: Callable[[], float], long: Callable[[], float], most: float, floor: float) -> bool:
    """Returns whether `long` takes `most` times the seconds of `short`, or more, in each of four measurements.

    `short` and `long` measure, and return, CPU seconds; those below `floor` count as `floor`. A busy machine lengthens
    times, of the one or of the other."""
    for _ in range(TIMES):
        seconds = long()
        if seconds < most * floor or seconds < most * max(short(), floor):
            return False
    return True
