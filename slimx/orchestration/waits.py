"""Races between work and what ends it early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from slimx.runtime.tasks import cancelled, race


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
