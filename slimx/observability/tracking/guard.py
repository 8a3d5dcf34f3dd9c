"""Guarded calls, whose failures do not stop the run: each failure is counted, and the first one is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable

from slimx.errors import raised


def print_warning(text: str) -> None:
    """Prints a message to standard error; a live table on the terminal shows the message above the table."""
    print(f"slimx: {text}", file=sys.stderr, flush=True)


class Guard:
    """Calls functions of a component, such as a sink of the tracker, and catches their exceptions. `name`: name of the
    component in messages. `warn` receives the message about the first failure."""

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        """Number of calls that raised an exception."""
        self._warn = warn

    def call(self, work: Callable[[], None]) -> None:
        """Calls `work`. If `work` raises an exception, counts it instead of raising it, and reports the first such
        exception together with the component's name."""
        try:
            work()
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                self._warn(f"{self.name} failed, but the run continues: {raised(error)}")
