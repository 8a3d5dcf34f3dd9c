"""Outages, during which no engine serves: requests wait and rollout deadlines are suspended. Also the engines' turn on
devices that they share with trainers (`schedule.colocate`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from slimx.runtime.clocks import Clock

LOOK_S = 0.5
"""Polling interval of an outage from another event loop, in seconds."""


class Outage:
    """A record of outages, times in which no engine serves. It belongs to one event loop; the owner of the engines
    begins and ends them."""

    def __init__(self) -> None:
        self._began: float | None = None
        """Start of the outage by the event loop's clock; None while engines serve."""
        self._before = 0.0
        self._served = asyncio.Event()
        self._served.set()
        self._clocks: dict[Clock, ExitStack] = {}
        """Clocks that are stopped during an outage, with the contexts that stop them."""

    @property
    def lasts(self) -> bool:
        """True while no engine serves."""
        return self._began is not None

    @property
    def since(self) -> float | None:
        """Unix time at which the outage began, by the current clock of this node; None while engines serve."""
        return None if self._began is None else time.time() - (_now() - self._began)

    def begin(self) -> None:
        """Marks the start of an outage. Idempotent."""
        if not self.lasts:
            self._began = _now()
            self._served.clear()
            for clock, stack in self._clocks.items():
                stack.enter_context(clock.paused())

    def end(self) -> None:
        """Marks the end of an outage: an engine serves. Idempotent."""
        if self.lasts:
            self._before = self.seconds
            self._began = None
            self._served.set()
            for stack in self._clocks.values():
                stack.close()

    async def over(self) -> None:
        """Waits until an engine serves."""
        await self._served.wait()

    @property
    def seconds(self) -> float:
        """Total duration of all outages so far, in seconds."""
        return self._before + (0.0 if self._began is None else _now() - self._began)

    def time(self) -> float:
        """Returns the time of the event loop's clock minus all outages, in seconds."""
        return _now() - self.seconds

    @contextmanager
    def stops(self, clock: Clock) -> Iterator[None]:
        """Stops the running `clock` during outages within this block."""
        with ExitStack() as stack:
            if self.lasts:
                stack.enter_context(clock.paused())
            self._clocks[clock] = stack
            try:
                yield
            finally:
                del self._clocks[clock]


class Outages:
    """Outages of several engine groups as one, which lasts while any of them does: a rollout may need all groups."""

    def __init__(self, parts: tuple[Outage, ...]) -> None:
        self._parts = parts

    def time(self) -> float:
        """Returns the time of the event loop's clock minus all outages, in seconds; overlapping outages count twice."""
        return _now() - sum(part.seconds for part in self._parts)

    @contextmanager
    def stops(self, clock: Clock) -> Iterator[None]:
        """Stops the running `clock` during outages within this block."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.stops(clock))
            yield


class RemoteOutage:
    """An outage as seen from other event loops."""

    def __init__(self, outage: Outage, hopeless: Callable[[], bool]) -> None:
        """Wraps `outage`. `hopeless` returns True if it will never end; then callers do not wait."""
        self._outage, self._hopeless = outage, hopeless

    @property
    def lasts(self) -> bool:
        return self._outage.lasts and not self._hopeless()

    async def over(self) -> None:
        while self.lasts:
            await asyncio.sleep(LOOK_S)


AnyOutage = Outage | RemoteOutage
"""An outage as seen by a request that needs the engines."""


class EnginesTurn:
    """The times in which engines may start. SGLang sizes its KV cache by free memory, so trainers must have left the
    devices first. The engines' turn lasts until `end` is called; without shared devices it never is."""

    def __init__(self) -> None:
        self._theirs = asyncio.Event()
        self._idle = asyncio.Event()
        self._theirs.set()
        self._idle.set()
        self._busy = 0
        """Number of engines that are being started or ended."""

    @property
    def theirs(self) -> bool:
        """True while engines may start."""
        return self._theirs.is_set()

    def begin(self) -> None:
        """Gives the devices to the engines."""
        self._theirs.set()

    async def end(self) -> None:
        """Prevents further starts and waits until no engine is starting or stopping. Starts and stops have their own
        deadlines."""
        self._theirs.clear()
        await self._idle.wait()

    async def come(self) -> None:
        """Waits for the engines' turn."""
        await self._theirs.wait()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Waits for the engines' turn and extends it until the block ends."""
        await self.come()
        async with self.ending():
            yield

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """Counts an engine that releases its memory inside the block, in any turn."""
        self._busy += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
