"""History of one metric: its recent level, its usual range and its noise, all computed from medians, so that single
outliers do not matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median, quantiles

USUAL = 100
"""Number of earlier values whose median and range count as usual."""
ENOUGH = 10
"""Number of usual values from which on a metric is judged."""
START = 20
"""Number of first values of a run whose median is the metric's level at the start."""


class History:
    """Values of one metric, oldest first. The last `recent` values form the current level; values that are older than
    these form the usual range, unless they were added during an alert."""

    def __init__(self, recent: int) -> None:
        self._recent: deque[float] = deque(maxlen=recent)
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._start: list[float] = []

    def add(self, value: float, *, unusual: bool) -> None:
        """Adds a value. `unusual`: True if the newest finding was bad or the alert is open; the usual range then stays
        as it is."""
        if len(self._start) < START:
            self._start.append(value)
        if len(self._recent) == self._recent.maxlen and not unusual:
            self._usual.append(self._recent[0])
        self._recent.append(value)

    @property
    def ready(self) -> bool:
        """True if there are enough values to judge the level."""
        return len(self._usual) >= ENOUGH

    @property
    def level(self) -> float:
        return median(self._recent)

    @property
    def usual(self) -> float:
        return median(self._usual)

    @property
    def start(self) -> float:
        return median(self._start)

    def usual_range(self) -> str:
        """Returns the range that contains 80% of the usual values, such as "0.1 to 0.2"."""
        tenths = quantiles(self._usual, n=10, method="inclusive")
        return f"{tenths[0]:.3g} to {tenths[-1]:.3g}"


def noise(values: Sequence[float]) -> float:
    """Returns the standard deviation of the noise in at least 3 values. It is the smaller of two robust estimates, of
    which the second ignores a linear trend: median |difference| / 0.954 and median |second difference| / 1.652."""
    first = [after - before for before, after in zip(values, values[1:], strict=False)]
    second = [after - before for before, after in zip(first, first[1:], strict=False)]
    return min(median(map(abs, first)) / 0.954, median(map(abs, second)) / 1.652)
