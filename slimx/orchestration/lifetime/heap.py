"""Python's garbage collector in the driver, whose heap is large and mostly never garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG, MIDDLE, OLD = 50_000, 10, 10
"""Objects after which the youngest are looked at; times of that after which the older ones are, and then all."""


@contextmanager
def settled_heap() -> Iterator[None]:
    """Entered once everything is imported and started.

    What is alive now is imported modules, mostly: each full collection would look at it again (0.2 s). And a step with
    10,000 rollouts in flight keeps a million objects alive: at Python's thresholds (700, 10, 10) a third of the time of
    making groups went into looking at them, over and over (benchmarks/rollout_buffer.py, 2 x86-64 cores, 2026-11-21).
    The objects of a rollout are freed without the collector; only cycles wait for it.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
