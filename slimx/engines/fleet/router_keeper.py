"""Keeps the router in front of the engines alive: its whole state, the list of members, can be restored.

A router that ends or does not respond is restarted at the same address, and the members are registered again. Clients
repeat the requests that were in it; requests that find no router wait (slimx/rollout/client/sending.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Protocol

from slimx.cluster.restarts import Restarts, describe_restarts
from slimx.cluster.waiting import first_line
from slimx.config.sections.engines import Health
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.server.router import Router
from slimx.errors import PartLost, SlimxError
from slimx.runtime.tasks import Ticker

PING_S = 10.0
"""Deadline of a healthy router's response, in seconds: it computes nothing."""


class Fleet(Protocol):
    """The engines of a router, as the keeper needs them."""

    health: Health
    start_deadline_s: float

    def members(self) -> Sequence[EngineHandle]: ...

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...

    def changed(self) -> None:
        """Updates the outage after the router was lost or came back."""

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Takes out a member that a responding router cannot add."""

    def fail(self, error: SlimxError) -> None:
        """Ends the run: the router's restarts are used up."""


class RouterKeeper:
    """One router across all its restarts, and the registration of engines with it."""

    def __init__(self, membership: Fleet, router: Router, restarts: Restarts):
        self.membership = membership
        self.router = router
        self.restarts = restarts
        self.in_flight: Callable[[], str] = lambda: ""
        """Returns a description of the pending requests for the note of a loss."""
        self.up = True
        self._restarting: asyncio.Task[None] | None = None
        restarts.serves()

    async def add(self, engine: EngineHandle) -> None:
        """Registers `engine` for requests. Raises SlimxError if the engine is at fault for a failure."""
        await self._try(lambda: self._add(engine))

    async def remove(self, url: str) -> None:
        """Removes the engine at `url`, which is no longer a member: it receives no new requests."""
        try:
            await self._try(lambda: self.router.remove(url))
        except SlimxError as error:
            await self.restart(error)  # a restarted router gets the current members only

    async def look(self) -> bool:
        """Returns True if the router had ended; it is running again when this returns."""
        end = self.router.ended()
        if end is None and not self._restarts_now:
            return False
        await self.restart(SlimxError(end or "it is being started again"))
        return True

    async def watch(self) -> None:
        """Checks the router every `health.interval` seconds. Restarts it if it has ended or failed `health.threshold`
        checks in a row."""
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
        """Restarts the router and registers the members; concurrent calls share one restart.

        Raises SlimxError if its restarts are used up.
        """
        if self._restarting is None or self._restarting.done():
            self._restarting = self.membership.spawn(self._restart(reason))
        await asyncio.shield(self._restarting)
        if not self.up:
            raise PartLost(f"the router is permanently lost: {first_line(reason)}", code="router.gone", about="router")

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
        limit = f"rollout.health.restarts is {self.membership.health.restarts}"
        history = describe_restarts(self.restarts.history)
        if history:
            limit += f": {history}"
        self.membership.fail(
            PartLost(
                f"the router is lost, and its restarts are used up ({limit}): {reason}",
                code="router.gone",
                about="router",
            )
        )

    async def _register_all(self, deadline_s: float) -> None:
        """Adds the members that the router does not list."""
        registered = {worker["url"] for worker in await self.router.workers(deadline_s)}
        missing = [engine for engine in self.membership.members() if engine.url not in registered]
        await asyncio.gather(*(self._add_again(engine) for engine in missing))

    async def _add_again(self, engine: EngineHandle) -> None:
        """Adds a member. Raises SlimxError if the router is at fault for a failure."""
        try:
            await self._add(engine)
        except SlimxError as error:
            await self.router.workers(PING_S)
            self.membership.spawn(self.membership.quarantine(engine, error))

    async def _add(self, engine: EngineHandle) -> None:
        spec = engine.spec
        incarnation = engine.incarnation
        await self.router.add(spec.url, role=spec.role, bootstrap_port=spec.bootstrap_port, keys=spec.keys)
        # An engine lost meanwhile may already be back, with other weights and at another URL.
        if not engine.standing.runs or engine.incarnation != incarnation:
            await self.router.remove(spec.url)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work`. Repeats it after a restart of the router if the router was at fault for a failure."""
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
