"""Waits for processes that asyncio started."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from contextlib import suppress


async def ended(process: Process, deadline_s: float) -> bool:
    """Waits for the exit of `process`. Returns False if it has not exited within `deadline_s` seconds.

    `Process.wait` would also wait for the process's pipes to close: forever, if one is full and no longer read.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while process.returncode is None:
                await asyncio.sleep(0.01)
    return process.returncode is not None
