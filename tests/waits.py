"""Waits of tests for something that happens in their event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DEADLINE_S = 600.0
"""Seconds of one wait, for hangs."""


async def until(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds. Raises TimeoutError after `DEADLINE_S`."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
