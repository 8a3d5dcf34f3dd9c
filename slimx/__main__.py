"""The program `slimx`, and `python -m slimx`: Ctrl-C ends it in one line from its first import on."""

from __future__ import annotations

import os
import signal


def entry() -> None:
    """Run the command line, whose imports take half a second; it handles Ctrl-C itself once it has begun."""
    signal.signal(signal.SIGINT, _end)
    from slimx.cli import entry as run

    run()


def _end(signum: int, frame: object) -> None:
    """End at once: nothing has begun, and an exception in the middle of an import may be lost there."""
    os.write(2, b"slimx: stopped by SIGINT\n")
    os._exit(128 + signum)


if __name__ == "__main__":
    entry()
