"""One question and its answer over a pipe to another process, within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def exchange(connection: Connection, message: Any, seconds: float, kill: Callable[[], None]) -> Any:
    """Send `message` and return the answer. Blocks.

    `kill` ends the other process after `seconds`: nothing less ends a wait for one that is stopped, be it half-way
    through a message. Raises TimeoutError then, and EOFError or OSError if it ended by itself."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        kill()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        connection.send(message)
        return connection.recv()
    except (EOFError, OSError):
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
