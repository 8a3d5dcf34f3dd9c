"""The program `slimx`, and `python -m slimx`: Ctrl-C ends it with one line from the first import on."""

from __future__ import annotations

import os
import signal


def entry() -> None:
    """Runs the command line. Its imports take half a second; afterwards it handles Ctrl-C itself."""
    signal.signal(signal.SIGINT, _end)
    from slimx.cli import entry as run

    run()


def _end(signum: int, frame: object) -> None:
    """Exits at once: nothing has begun yet, and an exception raised in the middle of an import may get lost."""
    os.write(2, b"slimx: stopped by SIGINT\n")
    os._exit(128 + signum)


if __name__ == "__main__":
    entry()
