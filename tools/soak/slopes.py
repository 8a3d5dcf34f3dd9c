"""Growth of a measure with the steps of a run, over processes that come and go, with a confidence interval.

Each process has a level of its own; the growth is common to all of a kind (least squares with fixed effects):

    y[p, i] = level[p] + slope * step[p, i] + error

Errors of neighbouring samples depend on each other (an allocator's arenas fill slowly), so the interval comes from a
bootstrap of whole blocks of residuals (moving blocks, Künsch 1989), not from their variance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tools.soak.census import Sample

PER = 1000
"""Number of steps to which a slope refers."""
FEWEST = 8
"""Minimum number of samples of a process that is counted."""
BLOCKS = 6
"""Number of blocks into which the residuals of a process are cut."""
DRAWS = 1000
Series = tuple[np.ndarray, np.ndarray]
"""Steps and values of one process."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per `PER` steps."""

    value: float
    low: float
    high: float
    """Upper end of the 95% confidence interval; `low` is the lower end."""
    processes: int
    samples: int
    steps: int
    """Steps over which the processes were observed, summed."""

    def verdict(self, bound: float) -> str:
        """Returns `grows` if the growth is certainly above `bound`, `flat` if it is certainly below, else `open`."""
        if self.low > bound:
            return "grows"
        return "flat" if self.high <= bound else "open"


def series_of(samples: Sequence[Sample], measure: Callable[[Sample], float], *, warm: int) -> list[Series]:
    """Returns the values of each process of one kind, without those of its first `warm` steps. Short-lived processes
    are left out."""
    lives: dict[tuple[int, float], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.pid, sample.born].append(sample)
    out = []
    for life in lives.values():
        kept = [sample for sample in life if sample.step >= life[0].step + warm]
        steps = np.array([sample.step for sample in kept], float)
        if len(kept) >= FEWEST and np.ptp(steps) > 0:
            out.append((steps, np.array([measure(sample) for sample in kept], float)))
    return out


def slope_of(series: Sequence[Series], seed: int = 1) -> Slope | None:
    """Returns the slope that all processes share; None without any series."""
    if not series:
        return None
    centered = [(steps - steps.mean(), values - values.mean()) for steps, values in series]
    scale = sum(float(steps @ steps) for steps, _ in centered)
    slope = sum(float(steps @ values) for steps, values in centered) / scale
    residuals = [values - slope * steps for steps, values in centered]
    random = np.random.default_rng(seed)
    moved = np.zeros(DRAWS)
    for (steps, _), residual in zip(centered, residuals, strict=True):
        length = max(1, len(residual) // BLOCKS)
        count = -(-len(residual) // length)
        starts = random.integers(0, len(residual) - length + 1, (DRAWS, count))
        drawn = residual[(starts[..., None] + np.arange(length)).reshape(DRAWS, -1)[:, : len(residual)]]
        moved += drawn @ steps / scale
    # Few blocks vary less than what they were cut from.
    widths = np.quantile(np.abs(moved), 0.95) * np.sqrt(BLOCKS / (BLOCKS - 2))
    return Slope(
        value=PER * slope,
        low=PER * (slope - widths),
        high=PER * (slope + widths),
        processes=len(series),
        samples=sum(len(steps) for steps, _ in series),
        steps=int(sum(np.ptp(steps) for steps, _ in series)),
    )
