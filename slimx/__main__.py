"""The program `slimx` (`python -m slimx`). Ctrl-C ends it with a one-line message, even while it is still importing
modules."""

from __future__ import annotations

import os
import signal


def entry() -> None:
    """Runs the command line. Its imports take half a second, during which Ctrl-C is handled here; afterwards
    `slimx.cli` handles it."""
    signal.signal(signal.SIGINT, _end)
    from slimx.cli import entry as run

    run()


def _end(signum: int, frame: object) -> None:
    """Handles Ctrl-C during the imports: exits immediately, because nothing has been started yet and a
    KeyboardInterrupt that is raised in the middle of an import may be swallowed."""
    os.write(2, b"slimx: stopped by SIGINT\n")
    os._exit(128 + signum)


if __name__ == "__main__":
    entry()
