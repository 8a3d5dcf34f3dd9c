"""Curves to test the checks of metrics with: those of a recorded quickstart, healthy, and ill ones made from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from slimx.extras.alerts.curves.watch import Curves

GROUPS = 32
HEALTHY: list[dict[str, float]] = [
    json.loads(line) for line in Path(__file__).with_name("healthy_run.jsonl").read_text().splitlines()
]
"""Metrics of each step of a quickstart of 100 steps (2026-11-30)."""


def longer(rows: Sequence[dict[str, float]], steps: int) -> Iterator[dict[str, float]]:
    """The rows, and then as many of the last 20 ones, again and again, as `steps` needs."""
    yield from rows
    for step in range(steps - len(rows)):
        yield rows[step % 20 - 20]


def changes(rows: Sequence[dict[str, float]], off: Sequence[str] = (), passing: float = 1.0) -> list[tuple]:
    """(index of the row, True if it opens, name, about) of all alerts."""
    curves = Curves(GROUPS, off, passing=passing)
    found = []
    for index, row in enumerate(rows):
        found += [(index, opens, finding.name, finding.about) for opens, finding in curves.look(row)]
    return found
