"""Work that may fail without stopping the run: every failure is counted, the first is told."""

from __future__ import annotations

import sys
from collections.abc import Callable


def print_warning(text: str) -> None:
    """One line on stderr; a live table lets it through above itself."""
    print(f"slimx: {text}", file=sys.stderr, flush=True)


class Guard:
    """Runs calls of one named helper, such as a tracker's sink, and keeps their failures from the run."""

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        """Calls that raised."""
        self._warn = warn

    def call(self, work: Callable[[], None]) -> None:
        """Runs `work`; an Exception is counted, and the first one is told by name."""
        try:
            work()
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                self._warn(f"{self.name} failed and the run goes on: {type(error).__name__}: {error}")
