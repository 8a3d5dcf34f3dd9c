"""Requests and responses over a pipe between two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from slimx.errors import raised


def exchange(connection: Connection, message: object, seconds: float, kill: Callable[[], None]) -> Any:
    """Sends `message` and returns the response. Blocks.

    `kill` ends the other process after `seconds`: if it is stopped, possibly in the middle of a message, nothing else
    unblocks the wait. Raises TimeoutError then, and EOFError or OSError if the process ended by itself."""
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
        if not settled.acquire(blocking=False):  # the process has been killed; a response that arrived is dropped
            raise TimeoutError from None


def reply(connection: Connection, work: Callable[[], object]) -> None:
    """Answers a request: sends (True, result of `work`), or (False, description of the error that it raised)."""
    try:
        response = (True, work())
    except Exception as error:
        response = (False, raised(error))
    try:
        connection.send(response)
    except Exception as error:  # pickling may raise anything
        with suppress(OSError):
            connection.send((False, f"{type(error).__name__}: its answer cannot be sent ({error})"))
