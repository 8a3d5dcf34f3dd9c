"""Ends of several tasks together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def cancelled(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; what they raise is nobody's concern any more."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def all_tried(*work: Awaitable[Any]) -> None:
    """Wait for all, whatever becomes of the others; the first problem is raised after that."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
