"""Measures the speed of this machine relative to the reference machine, so that seconds of two machines can be
compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import harmonic_mean

REFERENCE_S = 0.0625
"""CPU seconds of `loop_seconds` on the reference machine, which has a fast core."""
LOOPS = 1_000_000
EVERY_S = 15.0
"""Seconds between two samples: the speed of a virtual machine changes within minutes."""


def loop_seconds() -> float:
    """Returns the CPU seconds of a loop of plain Python."""
    began, total = time.thread_time(), 0
    for number in range(LOOPS):
        total += number * number % 7
    return time.thread_time() - began


@contextmanager
def sampled() -> Iterator[list[float]]:
    """Yields a list to which a thread appends CPU seconds of the loop until the block ends."""
    samples, over = [loop_seconds()], threading.Event()

    def sample() -> None:
        while not over.wait(EVERY_S):
            samples.append(loop_seconds())

    thread = threading.Thread(target=sample, name="speed of the machine", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def factor(samples: list[float]) -> float:
    """Returns this machine's CPU seconds for some work, relative to the reference machine's."""
    return round(harmonic_mean(samples) / REFERENCE_S, 2)
