"""Outages: periods in which no engine serves, so that requests wait and rollout deadlines are suspended.

Also the phases in which engines may start on devices that they share with trainers (`schedule.colocate`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from slimx.runtime.clocks import Clock

LOOK_S = 0.5
"""Interval in seconds at which code outside the outage's event loop checks whether the outage has ended."""


class Outage:
    """Record of outages: periods in which no engine is serving.

    The record belongs to one event loop. The code that manages the engines reports the start and the end of each
    outage."""

    def __init__(self) -> None:
        self._began: float | None = None
        """Time at which the current outage started, by the event loop's clock; None while engines serve."""
        self._before = 0.0
        self._served = asyncio.Event()
        self._served.set()
        self._clocks: dict[Clock, ExitStack] = {}
        """Clock that is paused during outages -> context that resumes the clock when it is closed."""

    @property
    def lasts(self) -> bool:
        """True while no engine serves."""
        return self._began is not None

    @property
    def since(self) -> float | None:
        """Unix time at which the current outage started, by this node's clock; None while engines serve."""
        return None if self._began is None else time.time() - (_now() - self._began)

    def begin(self) -> None:
        """Records the start of an outage and pauses the clocks, unless an outage has already started."""
        if not self.lasts:
            self._began = _now()
            self._served.clear()
            for clock, stack in self._clocks.items():
                stack.enter_context(clock.paused())

    def end(self) -> None:
        """Records the end of the outage, if there is one, and resumes the clocks."""
        if self.lasts:
            self._before = self.seconds
            self._began = None
            self._served.set()
            for stack in self._clocks.values():
                stack.close()

    async def wait_until_over(self) -> None:
        """Waits until an engine serves."""
        await self._served.wait()

    @property
    def seconds(self) -> float:
        """Total duration of all outages so far, in seconds."""
        return self._before + (0.0 if self._began is None else _now() - self._began)

    def time(self) -> float:
        """Returns the event loop's time in seconds, minus the duration of all outages, for deadlines that are suspended
        during outages."""
        return _now() - self.seconds

    @contextmanager
    def stops(self, clock: Clock) -> Iterator[None]:
        """Pauses the running `clock` during every outage that occurs within this block."""
        with ExitStack() as stack:
            if self.lasts:
                stack.enter_context(clock.paused())
            self._clocks[clock] = stack
            try:
                yield
            finally:
                del self._clocks[clock]


class Outages:
    """Outages of several engine groups, combined because a rollout may need all groups: an outage of any group
    counts."""

    def __init__(self, parts: tuple[Outage, ...]) -> None:
        self._parts = parts

    def time(self) -> float:
        """Returns the event loop's time in seconds, minus the sum of all groups' outage durations, in which overlapping
        outages count twice."""
        return _now() - sum(part.seconds for part in self._parts)

    @contextmanager
    def stops(self, clock: Clock) -> Iterator[None]:
        """Pauses the running `clock` inside the block, during every outage of any group."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.stops(clock))
            yield


class RemoteOutage:
    """View of an `Outage` for code outside the outage's event loop; polls for the end of the outage."""

    def __init__(self, outage: Outage, hopeless: Callable[[], bool]) -> None:
        """Wraps `outage`. `hopeless`: returns True if no engine can ever serve again, in which case callers stop
        waiting."""
        self._outage, self._hopeless = outage, hopeless

    @property
    def lasts(self) -> bool:
        return self._outage.lasts and not self._hopeless()

    async def wait_until_over(self) -> None:
        """Waits until an engine serves, or until none can ever serve again."""
        while self.lasts:
            await asyncio.sleep(LOOK_S)


AnyOutage = Outage | RemoteOutage
"""An outage as seen by a request that waits for engines, in the outage's event loop or in another one."""


class EnginePhase:
    """Phases in which engines may start on devices that they share with trainers.

    SGLang sizes its KV cache according to the free memory, so trainers must have released their memory first. A phase
    lasts until `end` is called; if no device is shared, `end` is never called and engines may always start."""

    def __init__(self) -> None:
        self._active = asyncio.Event()
        self._idle = asyncio.Event()
        self._active.set()
        self._idle.set()
        self._busy = 0
        """Number of engines that are being started or stopped."""

    @property
    def active(self) -> bool:
        """True while engines may start."""
        return self._active.is_set()

    def begin(self) -> None:
        """Begins a phase in which engines may start, because trainers have released their memory."""
        self._active.set()

    async def end(self) -> None:
        """Ends the phase: prevents further starts, and waits until no engine is starting or stopping.

        This wait has no deadline, because each start and stop has one."""
        self._active.clear()
        await self._idle.wait()

    async def wait(self) -> None:
        """Waits until engines may start."""
        await self._active.wait()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Waits until engines may start, and makes `end` wait until the block, which starts an engine, has ended."""
        await self.wait()
        async with self.stopping():
            yield

    @asynccontextmanager
    async def stopping(self) -> AsyncIterator[None]:
        """Makes `end` wait until the block, which stops an engine, has ended. Unlike starts, stops are allowed in every
        phase."""
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
