"""Keeps the router in front of the engines running.

A router that ends or does not respond is restarted at the same address, and the engines that serve are registered
again; the list of engines is the router's only state. Clients repeat requests that were lost with the router, and wait
while there is none (slimx/rollout/client/sending.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Protocol

from slimx.cluster.restarts import Restarts, describe_restarts
from slimx.config.sections.engines import Health
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.server.router import Router
from slimx.errors import PartLost, SlimxError, first_line
from slimx.runtime.tasks import Ticker

PING_S = 10.0
"""Maximum time in seconds that a healthy router takes to respond to a status request, which needs no computation."""


class Fleet(Protocol):
    """The engines behind a router, with the methods that its keeper calls; `Membership` implements it."""

    health: Health
    start_deadline_s: float

    def members(self) -> Sequence[EngineHandle]: ...

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...

    def changed(self) -> None:
        """Records the start or the end of an outage after the router was lost or came back."""

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Removes and restarts an engine that could not be registered although the router responds."""

    def fail(self, error: SlimxError) -> None:
        """Ends the run with `error`, because the router has no restarts left."""


class RouterKeeper:
    """Supervisor of one router: restarts the router when it fails, and registers engines with it."""

    def __init__(self, membership: Fleet, router: Router, restarts: Restarts):
        self.membership = membership
        self.router = router
        self.restarts = restarts
        self.in_flight: Callable[[], str] = lambda: ""
        """Function that returns a description of the pending requests, which is reported when the router is lost."""
        self.up = True
        self._restarting: asyncio.Task[None] | None = None
        restarts.serves()

    async def add(self, engine: EngineHandle) -> None:
        """Registers `engine` with the router; if the router fails, restarts it and tries again. Raises SlimxError if
        the engine, not the router, caused the failure."""
        await self._try(lambda: self._add(engine))

    async def remove(self, url: str) -> None:
        """Removes the engine at `url`, which no longer serves, from the router, so that it receives no new requests."""
        try:
            await self._try(lambda: self.router.remove(url))
        except SlimxError as error:
            await self.restart(error)  # engines that no longer serve are not registered with the new router

    async def look(self) -> bool:
        """Restarts the router if its process has ended, and waits until it responds again. Returns True if it was
        restarted."""
        end = self.router.ended()
        if end is None and not self._restarts_now:
            return False
        await self.restart(SlimxError(end or "the router is being restarted"))
        return True

    async def watch(self) -> None:
        """Checks the router every `health.interval` seconds until cancelled. Restarts it if it has ended or has failed
        `health.threshold` consecutive checks."""
        failures = 0
        ticker = Ticker(self.membership.health.interval)
        while True:
            await ticker.round()
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
        """Restarts the router because of `reason` and registers the engines that serve; concurrent calls share one
        restart.

        Raises SlimxError if the router has no restarts left."""
        if self._restarting is None or self._restarting.done():
            self._restarting = self.membership.spawn(self._restart(reason))
        await asyncio.shield(self._restarting)
        if not self.up:
            raise PartLost(
                f"the router is permanently lost ({first_line(reason)}); find the cause in the router's log, and run "
                "the same command again to resume",
                code="router.gone",
                about="router",
            )

    @property
    def _restarts_now(self) -> bool:
        return self._restarting is not None and not self._restarting.done()

    async def _restart(self, reason: SlimxError) -> None:
        self.up = False
        self.restarts.lost()
        loss = f"the router is lost: {first_line(reason)}"
        requests = self.in_flight()
        self.restarts.note(f"{loss}; {requests}" if requests else loss)
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
        limit = describe_restarts(self.membership.health, self.restarts.history)
        self.membership.fail(
            PartLost(
                f"the router is lost, and all its restarts ({limit}) are used up (last error: {reason}); find "
                "the cause in the router's log, and run the same command again to resume",
                code="router.gone",
                about="router",
            )
        )

    async def _register_all(self, deadline_s: float) -> None:
        """Registers every serving engine that is missing from the router's list."""
        registered = {worker["url"] for worker in await self.router.workers(deadline_s)}
        missing = [engine for engine in self.membership.members() if engine.url not in registered]
        await asyncio.gather(*(self._add_again(engine) for engine in missing))

    async def _add_again(self, engine: EngineHandle) -> None:
        """Registers an engine with the restarted router; quarantines the engine if that fails although the router
        responds. Raises SlimxError if the router does not respond."""
        try:
            await self._add(engine)
        except SlimxError as error:
            await self.router.workers(PING_S)
            self.membership.spawn(self.membership.quarantine(engine, error))

    async def _add(self, engine: EngineHandle) -> None:
        spec = engine.spec
        incarnation = engine.incarnation
        await self.router.add(spec.url, role=spec.role, bootstrap_port=spec.bootstrap_port, keys=spec.keys)
        # An engine lost meanwhile may have restarted already, with other weights and at another URL.
        if not engine.state.runs or engine.incarnation != incarnation:
            await self.router.remove(spec.url)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        """Awaits `work()`, a request to the router; if the request fails because of the router, restarts the router and
        repeats the request."""
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
