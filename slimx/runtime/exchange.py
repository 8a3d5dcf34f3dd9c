"""Requests and responses over a pipe between two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from slimx.errors import raised


def exchange(connection: Connection, message: object, seconds: float, kill: Callable[[], None]) -> Any:
    """Sends `message` over `connection` and returns the response. Blocks.

    If there is no response within `seconds` seconds, calls `kill`, which must kill the other process: if that process
    is stopped, possibly in the middle of a message, nothing else unblocks the wait. Raises TimeoutError in this case,
    and EOFError or OSError if the other process ended by itself."""
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
        if not settled.acquire(blocking=False):  # `kill` was called, so a response is ignored
            raise TimeoutError from None


def reply(connection: Connection, work: Callable[[], object]) -> None:
    """Answers a request over `connection`: sends (True, result of `work`), or (False, description of the error that
    `work` raised)."""
    try:
        response = (True, work())
    except Exception as error:
        response = (False, raised(error))
    try:
        connection.send(response)
    except Exception as error:  # pickling may raise anything
        with suppress(OSError):
            connection.send((False, f"{type(error).__name__}: the result cannot be sent back ({error})"))
