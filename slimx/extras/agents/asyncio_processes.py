"""Processes that asyncio has started."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from contextlib import suppress


async def ended(process: Process, deadline_s: float) -> bool:
    """Wait for the end of a process; returns False if it has not come within `deadline_s` seconds.

    `Process.wait` also waits until its pipes are closed, and for ever where one is full and not read any more."""
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while process.returncode is None:
                await asyncio.sleep(0.01)
    return process.returncode is not None
