"""Ends of several tasks together, what ends one early, the pace of one that repeats, and work in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any


async def cancelled(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; what they raise is nobody's concern any more."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def all_or_none[T](work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all, in their order; the first failure cancels the rest, and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def race(*work: Awaitable[Any]) -> list[asyncio.Future[Any] | None]:
    """Wait until one of `work` has ended, and cancel the others; return the future of each that ended, None for the
    others: an error by which one answers its cancellation is not the reason why the race is over."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return [task if task.done() else None for task in tasks]
    finally:
        await cancelled(*(task for task in tasks if not task.done()))


async def first_of[T](work: Iterable[Awaitable[T]]) -> T:
    """Return the result of the one that ends first, or raise its failure; the others are cancelled."""
    return next(task for task in await race(*work) if task is not None).result()


async def all_tried(*work: Awaitable[Any]) -> None:
    """Wait for all, whatever becomes of the others; the first problem is raised after that."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


class Pace:
    """The pace of a loop: its rounds begin `seconds` apart, or one at the end of the other where they take longer."""

    def __init__(self, seconds: float):
        self._seconds, self._loop = seconds, asyncio.get_running_loop()
        self._next = self._loop.time() + seconds

    async def round(self) -> None:
        """Wait until the next round is due."""
        await asyncio.sleep(max(0.0, self._next - self._loop.time()))
        self._next = self._loop.time() + self._seconds


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


async def while_served[T](
    work: Awaitable[T],
    needed: Callable[[], Awaitable[None]],
    supply: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """The result of `work`, for which engines are needed.

    Each time `needed` returns, `supply` is awaited: engines wait for weights. What `needed` raises, because no engine
    is left, ends the wait, and is raised even if `work` failed at the same time: it tells more than what became of the
    work. Work that is not finished is cancelled."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    event: asyncio.Future[None] | None = None
    try:
        while True:
            event = asyncio.ensure_future(needed())
            await asyncio.wait({task, event}, return_when=asyncio.FIRST_COMPLETED)
            if event.done() and not (task.done() and task.exception() is None):
                event.result()
            if task.done() or supply is None:
                return await task
            await supply()
    finally:
        await cancelled(task, event)


async def unless[T](event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if `event` comes first: `work` is cancelled then."""
    task, _ = await race(work, event.wait())
    return None if task is None else task.result()
