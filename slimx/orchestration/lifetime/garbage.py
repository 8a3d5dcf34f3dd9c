"""Python's garbage collector in the driver, whose heap is large and contains little garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG, MIDDLE, OLD = 50_000, 10, 10
"""Thresholds of gc.set_threshold. Young: new objects per collection. Middle and old: collections of the generation
below per collection."""


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freezes the heap and raises the collector's thresholds within the block, which begins after imports and start-up.

    Most live objects are imported modules, and each full collection would scan them again (0.2 s). A step with 10,000
    rollouts in flight keeps a million objects alive: at Python's thresholds (700, 10, 10), a third of the time to build
    groups was spent on scanning them (benchmarks/rollout_buffer.py, 2 x86-64 cores, 2026-11-21). Objects of a rollout
    are freed without the collector; only cycles wait for it.
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
