"""Settings of Python's garbage collector for the driver process, whose heap is large and contains little garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG, MIDDLE, OLD = 50_000, 10, 10
"""Arguments of gc.set_threshold. YOUNG: number of new objects after which the youngest generation is collected. MIDDLE
and OLD: number of collections of the next younger generation after which the middle and the oldest generation are
collected."""


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freezes the heap and raises the garbage collector's thresholds until the block ends; must be entered once imports
    and startup are complete.

    Most live objects belong to imported modules, and each full collection would scan them again (0.2 s). A step with
    10,000 rollouts in flight keeps a million objects alive. With Python's default thresholds (700, 10, 10), scanning
    these objects took a third of the time of building groups (benchmarks/rollout_buffer.py, 2 x86-64 cores,
    2026-11-21). Reference counting frees the objects of a rollout; only reference cycles wait for the collector."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
