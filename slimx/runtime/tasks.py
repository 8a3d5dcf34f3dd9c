"""Helpers for asyncio: tasks that end together, races between tasks, periodic loops, calls in daemon threads, and event
loops inside others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from slimx.errors import DeadlineError

type AnyFuture = asyncio.Future[Any]
"""Future with a result of any type. Future is invariant in its result type, and these functions ignore the result."""


async def cancelled(*tasks: AnyFuture | None) -> None:
    """Cancels `tasks` and waits until they have ended; their exceptions are ignored, and so are entries that are
    None."""
    pending = [task for task in tasks if task is not None]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def all_or_none[T](work: Iterable[Awaitable[T]]) -> list[T]:
    """Runs all of `work` concurrently and returns the results in order. The first failure cancels the rest and is then
    raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def race(*work: Awaitable[object]) -> list[AnyFuture | None]:
    """Runs all of `work` concurrently until one is done, then cancels the rest.

    Returns a list in the order of `work`: the future of each that was done, None for each that was cancelled. An error
    that an awaitable raises because it was cancelled is ignored, because that error did not end the race."""
    tasks: list[AnyFuture] = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return [task if task.done() else None for task in tasks]
    finally:
        await cancelled(*(task for task in tasks if not task.done()))


async def first_of[T](work: Iterable[Awaitable[T]]) -> T:
    """Runs all of `work` concurrently, returns the result of the first that is done or raises its error, and cancels
    the rest."""
    return next(task for task in await race(*work) if task is not None).result()


async def all_tried(*work: Awaitable[object]) -> None:
    """Runs all of `work` concurrently and waits for all, even if some fail; then raises the first error."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


class Ticker:
    """Timer of a loop whose iterations start `seconds` apart, or immediately after each other if they take longer."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time() + seconds

    async def round(self) -> None:
        """Waits until the next iteration is due."""
        await asyncio.sleep(max(0.0, self._next - self._loop.time()))
        self._next = self._loop.time() + self._seconds


async def in_thread[**P, T](function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Runs `function` in a new daemon thread, as `start_thread` does, and returns its result."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not result.done():  # done means that the caller was cancelled
            set_outcome()

    def work() -> None:
        try:
            value = function(*arguments, **keywords)
        except StopIteration as error:  # a future refuses it
            outcome = partial(result.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            outcome = partial(result.set_exception, error)
        else:
            outcome = partial(result.set_result, value)
        with suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(settle, outcome)

    start_thread(work, getattr(function, "__name__", "work"))
    return await result


def start_thread(work: Callable[[], object], name: str) -> None:
    """Runs `work` with the caller's context variables in a new daemon thread, which does not delay the exit of the
    process. `name`: name of the thread after "slimx"."""
    threading.Thread(target=copy_context().run, args=(work,), name=f"slimx {name}", daemon=True).start()


async def within[T](seconds: float, work: Awaitable[T], awaited: str, holder: str) -> T:
    """Returns the result of `work`; after `seconds`, cancels it and raises DeadlineError of `awaited` and `holder`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # raised by `work`
            raise
        raise DeadlineError(awaited, seconds, holder) from None


async def while_served[T](
    work: Awaitable[T],
    needed: Callable[[], Awaitable[None]],
    supply: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """Returns the result of `work`, which needs engines, and meanwhile supplies the engines with weights when they wait
    for them. An error in `needed` or `supply` cancels `work`.

    `needed` returns whenever engines wait for weights; `supply`, which sends the weights, is awaited each time.
    `needed` raises an error when no engine is left. This error is raised even if `work` fails at the same time, because
    it explains why `work` failed."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    event: asyncio.Future[None] | None = None
    try:
        while True:
            event = asyncio.ensure_future(needed())
            futures: list[AnyFuture] = [task, event]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if event.done() and not (task.done() and task.exception() is None):
                event.result()
            if task.done() or supply is None:
                return await task
            await supply()
    finally:
        await cancelled(task, event)


async def unless[T](event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Returns the result of `work`, or None if `event` is set first, in which case `work` is cancelled."""
    task = asyncio.ensure_future(work)
    done, _ = await race(task, event.wait())
    return None if done is None else task.result()


@contextmanager
def without_loop() -> Iterator[None]:
    """Lets the `with` block run an event loop although one is already running; the outer loop is paused meanwhile."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
