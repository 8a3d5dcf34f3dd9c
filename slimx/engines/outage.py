"""Times in which no engine serves, where requests wait and the deadlines of rollouts stand still, and the engines' turn
on devices that they share with trainers (`schedule.colocate`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from slimx.runtime.clocks import Clock

LOOK_S = 0.5
"""Seconds between two looks at an outage from another event loop."""


class Outage:
    """A record of outages, times in which no engine serves. It belongs to one event loop; whoever knows of the engines
    begins and ends them."""

    def __init__(self) -> None:
        self._began: float | None = None
        """Begin of the outage by the event loop's clock; None while engines serve."""
        self._before = 0.0
        self._served = asyncio.Event()
        self._served.set()
        self._clocks: dict[Clock, ExitStack] = {}
        """Clocks that stand still while it lasts, and what holds them."""

    @property
    def lasts(self) -> bool:
        """True while no engine serves."""
        return self._began is not None

    @property
    def since(self) -> float | None:
        """Unix seconds at which the outage began, by the present clock of this machine; None while engines serve."""
        return None if self._began is None else time.time() - (_now() - self._began)

    def begin(self) -> None:
        """No engine serves from now on. Twice is once."""
        if not self.lasts:
            self._began = _now()
            self._served.clear()
            for clock, held in self._clocks.items():
                held.enter_context(clock.standing())

    def end(self) -> None:
        """An engine serves from now on. Twice is once."""
        if self.lasts:
            self._before, self._began = self.seconds, None
            self._served.set()
            for held in self._clocks.values():
                held.close()

    async def over(self) -> None:
        """Wait until an engine serves."""
        await self._served.wait()

    @property
    def seconds(self) -> float:
        """Seconds of all outages so far, together."""
        return self._before + (0.0 if self._began is None else _now() - self._began)

    def time(self) -> float:
        """Seconds of the event loop's clock, which stands still while an outage lasts."""
        return _now() - self.seconds

    @contextmanager
    def stops(self, clock: Clock) -> Iterator[None]:
        """`clock`, which runs, stands still in the outages of this block."""
        with ExitStack() as held:
            if self.lasts:
                held.enter_context(clock.standing())
            self._clocks[clock] = held
            try:
                yield
            finally:
                del self._clocks[clock]


class Outages:
    """Outages of several groups of engines as one, which lasts while any of them does: a rollout may need them all."""

    def __init__(self, parts: tuple[Outage, ...]) -> None:
        self._parts = parts

    def time(self) -> float:
        """Seconds of the event loop's clock, which stands still while one lasts; time of two at once counts twice."""
        return _now() - sum(part.seconds for part in self._parts)

    @contextmanager
    def stops(self, clock: Clock) -> Iterator[None]:
        """`clock`, which runs, stands still in the outages of this block."""
        with ExitStack() as held:
            for part in self._parts:
                held.enter_context(part.stops(clock))
            yield


class Elsewhere:
    """An outage as seen from other event loops."""

    def __init__(self, outage: Outage, hopeless: Callable[[], bool]) -> None:
        """`hopeless`: whether it will never end; then nobody waits for that."""
        self._outage, self._hopeless = outage, hopeless

    @property
    def lasts(self) -> bool:
        return self._outage.lasts and not self._hopeless()

    async def over(self) -> None:
        while self.lasts:
            await asyncio.sleep(LOOK_S)


Absence = Outage | Elsewhere
"""An outage as seen by a request that needs the engines."""


class EnginesTurn:
    """Says when engines may start: SGLang sizes its KV cache by the memory that is free then, so trainers must be gone
    from the devices. The turn is the engines' until `end` is called; without shared devices it never is."""

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
        """Count an engine that gives its memory back inside the block, in any turn."""
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
