"""The engines' turn on devices that they share with trainers (`schedule.colocate`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class EnginesTurn:
    """Says when engines may start: SGLang sizes its KV cache by the memory that is free then, so trainers must be gone
    from the devices. The turn is the engines' until somebody ends it; without shared devices nobody does."""

    def __init__(self) -> None:
        self._theirs, self._idle = asyncio.Event(), asyncio.Event()
        self._theirs.set()
        self._idle.set()
        self._busy = 0
        """Engines that are being started or ended."""

    @property
    def theirs(self) -> bool:
        """True while engines may start."""
        return self._theirs.is_set()

    def begin(self) -> None:
        """Give the devices to the engines."""
        self._theirs.set()

    async def end(self) -> None:
        """Let no engine start from now on; returns when none is being started or ended. A start has its own deadline,
        and so has an end."""
        self._theirs.clear()
        await self._idle.wait()

    async def come(self) -> None:
        """Wait for the engines' turn."""
        await self._theirs.wait()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Wait for the engines' turn, which lasts until the block ends."""
        await self.come()
        async with self.ending():
            yield

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """An engine gives its memory back inside the block, whoever's turn it is."""
        self._busy += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()
