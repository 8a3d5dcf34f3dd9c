"""Blocking work of slimx's own in threads that nothing else uses.

asyncio's default executor belongs to hooks (`asyncio.to_thread`): threads of theirs that never return fill it, and what
waits behind them never begins.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_thread[**P, T](function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The result of a call in a new thread, which ends with the process wherever it is then (a daemon)."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        value, error = None, None
        try:
            value = function(*arguments, **named)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, result, value, error)

    threading.Thread(target=work, name=f"slimx {getattr(function, '__name__', 'work')}", daemon=True).start()
    return await result


def _settle(result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if result.done():  # given up meanwhile
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
