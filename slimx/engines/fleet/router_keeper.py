"""Keeps the router in front of engines alive: it holds nothing that cannot be told to another one.

A router that ends or does not answer is started again at the same address and told the members. Requests that were in
it break off and are sent again by their clients; those that find it gone wait (slimx/rollout/client/sending.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from slimx.cluster.restarts import Restarts, describe_restarts
from slimx.cluster.waiting import first_line
from slimx.config.sections.engines import Health
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.server.router import Router
from slimx.errors import PartLost, SlimxError
from slimx.runtime.tasks import Pace

PING_S = 10.0
"""Seconds in which a router that lives answers: it computes nothing."""


class Fleet(Protocol):
    """The engines that belong into a router, and what becomes of them."""

    health: Health
    start_deadline_s: float

    def members(self) -> Sequence[EngineHandle]: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def changed(self) -> None:
        """The router is lost, or is back."""

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Take out a member that a router which answers cannot add."""

    def fail(self, error: SlimxError) -> None:
        """The router may not be started again."""


class RouterKeeper:
    """One router, through all its restarts, and the registration of engines with it."""

    def __init__(self, membership: Fleet, router: Router, restarts: Restarts):
        self.membership, self.router, self.restarts = membership, router, restarts
        self.in_flight: Callable[[], str] = lambda: ""
        """Names the requests that are out, for the note of a loss."""
        self.up = True
        self._restarting: asyncio.Task[None] | None = None
        restarts.serves()

    async def add(self, engine: EngineHandle) -> None:
        """Let requests reach `engine`. Raises SlimxError if it is the engine that cannot be added."""
        await self._try(lambda: self._add(engine))

    async def remove(self, url: str) -> None:
        """Let no new request reach the engine at `url`, which is no member any more."""
        try:
            await self._try(lambda: self.router.remove(url))
        except SlimxError as error:
            await self.restart(error)  # another one is told the members alone

    async def look(self) -> bool:
        """Returns True if the router had ended; it is running again when this returns."""
        end = self.router.ended()
        if end is None and not self._restarts_now:
            return False
        await self.restart(SlimxError(end or "it is being started again"))
        return True

    async def watch(self) -> None:
        """Look at the router every `health.interval` seconds, and start it again where it has ended, or was silent
        `health.threshold` times in a row."""
        failures, pace = 0, Pace(self.membership.health.interval)
        while True:
            await pace.round()
            if await self.look():
                failures = 0
                continue
            try:
                await self._register_all(min(PING_S, self.membership.health.timeout))
                failures = 0
            except SlimxError as error:
                failures += 1
                if failures >= self.membership.health.threshold:
                    await self.restart(error)
                    failures = 0

    async def restart(self, reason: SlimxError) -> None:
        """Start the router again and tell it the members; calls that come together share one restart.

        Raises SlimxError if it may not be started again."""
        if not self._restarts_now:
            self._restarting = self.membership.spawn(self._restart(reason))
        await asyncio.shield(self._restarting)
        if not self.up:
            raise PartLost(f"the router is lost for good: {first_line(reason)}", code="router.gone", about="router")

    @property
    def _restarts_now(self) -> bool:
        return self._restarting is not None and not self._restarting.done()

    async def _restart(self, reason: SlimxError) -> None:
        self.up = False
        self.restarts.lost()
        out = self.in_flight()
        self.restarts.note(f"the router is lost: {first_line(reason)}{out and f'; {out}'}")
        self.membership.changed()
        while self.restarts.left:
            await asyncio.sleep(self.restarts.pause)
            try:
                with self.restarts.attempt(reason):
                    await self.router.restart(self.membership.start_deadline_s)
                    await self._register_all(PING_S)
            except SlimxError as error:
                reason = error
                continue
            self.up = True
            self.restarts.serves()
            self.membership.changed()
            return
        told = describe_restarts(self.restarts.history)
        self.membership.fail(
            PartLost(
                f"the router is lost, and may not be started again ("
                f"rollout.health.restarts is {self.membership.health.restarts}{told and f': {told}'}): {reason}",
                code="router.gone",
                about="router",
            )
        )

    async def _register_all(self, deadline_s: float) -> None:
        """Add the members that the router does not know."""
        known = {worker["url"] for worker in await self.router.workers(deadline_s)}
        await asyncio.gather(
            *(self._add_again(engine) for engine in self.membership.members() if engine.url not in known)
        )

    async def _add_again(self, engine: EngineHandle) -> None:
        """Add a member. Raises SlimxError if that is the router's fault."""
        try:
            await self._add(engine)
        except SlimxError as error:
            await self.router.workers(PING_S)
            self.membership.spawn(self.membership.quarantine(engine, error))

    async def _add(self, engine: EngineHandle) -> None:
        spec, incarnation = engine.spec, engine.incarnation
        await self.router.add(spec.url, role=spec.role, bootstrap_port=spec.bootstrap_port, keys=spec.keys)
        # Lost meanwhile, it may even be back by now, with other weights and at another URL.
        if not engine.standing.runs or engine.incarnation != incarnation:
            await self.router.remove(spec.url)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work`; where it failed because the router did, again after its restart."""
        while True:
            if self._restarts_now:
                await self.look()
            try:
                return await work()
            except SlimxError:
                if await self.look():
                    continue
                try:
                    await self.router.workers(min(PING_S, self.membership.health.timeout))
                except SlimxError as silence:
                    await self.restart(silence)
                    continue
                raise
