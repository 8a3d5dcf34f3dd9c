"""Measures this machine beside the reference machine, so that seconds of two machines can be compared."""

from __future__ import annotations

import time

REFERENCE_S = 0.5
"""CPU seconds of `loop_seconds` on the reference machine, a fast core."""
LOOPS = 8_000_000


def loop_seconds() -> float:
    """Returns the CPU seconds of a loop of plain Python."""
    began, total = time.process_time(), 0
    for number in range(LOOPS):
        total += number * number % 7
    return time.process_time() - began


def factor(before: float, after: float) -> float:
    """Returns how many times the reference machine's CPU seconds this one takes, before and after the tests."""
    return round((before + after) / 2 / REFERENCE_S, 2)
