"""Result of one look of a check, and the hysteresis by which such findings open and close alerts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one look at a metric, a disk or a GPU."""

    name: str
    """Name of the alert that the finding can open, such as "gap"."""
    about: str = ""
    """Policy, data set, directory or GPU that the finding concerns; "" for the policy `actor`."""
    bad: bool
    good: bool
    """True if an open alert may close. A finding can be neither bad nor good."""
    text: str
    """One line that names the value and its usual range."""
    value: float | None = None
    usual: str = ""
    """Usual range of the value, such as "0.1 to 0.2"; "" if there is none."""


@dataclass(slots=True)
class Gate:
    """Hysteresis of one alert: it opens after `opens` bad findings in a row, and closes after `closes` good ones."""

    opens: int
    closes: int
    is_open: bool = False
    _count: int = 0

    def passes(self, finding: Finding) -> bool:
        """Counts a finding. Returns True if it opens or closes the alert; `is_open` is then the new state."""
        counts = finding.bad
        needed = self.opens
        if self.is_open:
            counts = finding.good
            needed = self.closes
        self._count += 1
        if not counts:
            self._count = 0
        if self._count < needed:
            return False
        self.is_open = not self.is_open
        self._count = 0
        return True
