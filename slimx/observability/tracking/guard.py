"""Work that may fail without stopping the run: every failure is counted, and the first one is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable


def print_warning(text: str) -> None:
    """Prints a line on stderr, which a live table shows above itself."""
    print(f"slimx: {text}", file=sys.stderr, flush=True)


class Guard:
    """Runs calls of one named component, such as a tracker's sink, and isolates the run from their failures."""

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        """Number of calls that raised."""
        self._warn = warn

    def call(self, work: Callable[[], None]) -> None:
        """Runs `work`. An Exception is counted, and the first one is reported with the component's name."""
        try:
            work()
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                self._warn(f"{self.name} failed, and the run continues: {type(error).__name__}: {error}")
