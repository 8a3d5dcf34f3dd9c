"""The metrics of several updates as those of one step."""

from __future__ import annotations

from collections.abc import Sequence

LAST = frozenset({"optim/lr", "critic/lr"})
"""Metrics of which the newest value stands for the step."""
COUNTS = frozenset({"optim/skipped", "critic/skipped"})
"""Metrics that count something and add up."""


def combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates, in order.

    Counts add up, maxima (`.../max`, `..._max`) stay maxima, the learning rate is the last one. All others are means
    over the updates that have them: each update's loss has its own denominators, and each moved the weights once.
    """
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return {name: _combined(name, [metrics[name] for metrics in updates if name in metrics]) for name in names}


def _combined(name: str, values: list[float]) -> float:
    if name in LAST:
        return values[-1]
    if name in COUNTS:
        return sum(values)
    if name.endswith(("/max", "_max")):
        return max(values)
    return sum(values) / len(values)
