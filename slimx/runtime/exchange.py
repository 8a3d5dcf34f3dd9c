"""Questions and answers over a pipe between two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from slimx.errors import raised


def exchange(connection: Connection, message: Any, seconds: float, kill: Callable[[], None]) -> Any:
    """Send `message` and return the answer. Blocks.

    `kill` ends the other process after `seconds`: nothing less ends a wait for one that is stopped, be it half-way
    through a message. Raises TimeoutError then, and EOFError or OSError if it ended by itself."""
    settled = threading.Lock()

    def give_up() -> None:
        if settled.acquire(blocking=False):
            kill()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        connection.send(message)
        return connection.recv()
    finally:
        timer.cancel()
        if not settled.acquire(blocking=False):  # an answer that came meanwhile is one of a process that is killed
            raise TimeoutError from None


def reply(connection: Connection, work: Callable[[], Any]) -> None:
    """Answer a question: send (True, what `work` returned), or (False, what it raised, in words)."""
    try:
        answer = True, work()
    except Exception as error:
        answer = False, raised(error)
    try:
        connection.send(answer)
    except Exception as error:  # of many kinds: whatever pickling its answer raises
        with suppress(OSError):
            connection.send((False, f"{type(error).__name__}: its answer cannot be sent ({error})"))
