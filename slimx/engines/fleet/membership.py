"""Membership of engines in the run: losses are found, isolated and repaired while the run goes on.

    start --> JOINING --a verified publication--> MEMBER --failed, late, dead--> OUT --restarted--> JOINING
                                                                                  |
                                                                                  +--restarts used up--> GONE

An engine that fails in any way leaves the router at once, its whole process tree is killed (a half-updated server gets
no time to answer anything), and it is started again in the background. It serves again only after a complete, verified
publication. While none serves there is an outage: requests wait, their deadlines and those of rollouts stand still. The
run ends only when no engine is left that could come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from slimx.cluster.restarts import Restart, Restarts, describe_restarts
from slimx.cluster.waiting import first_line
from slimx.config.sections.engines import Health
from slimx.engines.fleet.handle import EngineHandle, Standing
from slimx.engines.fleet.router_keeper import RouterKeeper
from slimx.engines.outage import EnginesTurn, Outage
from slimx.engines.server.router import Router
from slimx.engines.server.server import ANSWER_S
from slimx.errors import DeadlineError, PartLost, SlimxError
from slimx.reshard.parties import ReceiverLost
from slimx.runtime.tasks import Pace, cancelled


async def _nothing(error: SlimxError) -> None:
    """Nobody wants to look at a lost engine."""


class Membership:
    """The run's engines, as the publisher (`slimx.reshard.parties.Members`) and the loop need them."""

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        router: Router,
        *,
        health: Health,
        start_deadline_s: float,
        note: Callable[[str], None] = lambda text: None,
        record: Callable[[Restart], None] = lambda restart: None,
        pause_s: float = 1.0,
    ):
        """`start_deadline_s`: seconds for one start of an engine, or of the router. `note` is told what happens to
        them, `record` of every restart. `pause_s`: seconds before the second restart in a row of one of them."""
        self.engines, self.health, self.start_deadline_s, self.note = engines, health, start_deadline_s, note

        def kept(restart: Restart) -> None:
            record(restart)
            self.on_change()

        def restarts(part: str) -> Restarts:
            return Restarts(part, health, note=note, record=kept, pause_s=pause_s)

        self.restarts = {engine.name: restarts(f"engine {engine.name}") for engine in engines}
        self.keeper = RouterKeeper(self, router, restarts("router"))
        self.turn = EnginesTurn()
        """Time in which lost engines are started again."""
        self.outage = Outage()
        """Outages of the run: one lasts while no engine, or no router, serves after some did."""
        self.probe: Callable[[EngineHandle], Awaitable[None]] | None = None
        """Probe that has an engine in the router do, asked directly, what requests ask of it; raises SlimxError if it
        does not. None: the health check is all that is known of an engine."""
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str, SlimxError], None] = lambda name, error: None
        """Called whenever an engine's standing may have changed, and after every restart."""
        self.before_ending: Callable[[SlimxError], Awaitable[None]] = _nothing
        """Awaited before an engine that was lost by this error is ended."""
        self.epoch = 0
        """Rises with every change of who is a candidate or a member."""
        self.lost = 0
        """Engines lost in this run."""
        self._failure: SlimxError | None = None
        """Why the run cannot go on."""
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        """Watchers and recoveries: they end with the run."""
        self._look: asyncio.Task[None] | None = None
        self._ran = self._served = False
        """True once engines have run, and once they have served."""
        self._patience: asyncio.Task[None] | None = None
        """Task that ends the run if no engine comes back."""

    # Who takes part ---------------------------------------------------------------------------------------------------

    def candidates(self) -> list[EngineHandle]:
        """Engines that run, in the router or not."""
        return [engine for engine in self.engines if engine.standing.runs]

    def joining(self) -> list[EngineHandle]:
        """Engines that run and wait for a publication."""
        return [engine for engine in self.engines if engine.standing is Standing.JOINING]

    def members(self) -> list[EngineHandle]:
        """Engines in the router."""
        return [engine for engine in self.engines if engine.standing is Standing.MEMBER]

    def _every_role(self, engines: Sequence[EngineHandle]) -> bool:
        """Returns True if `engines` can serve without the others."""
        return {engine.spec.role for engine in engines} == {engine.spec.role for engine in self.engines}

    async def admit(self, engine: EngineHandle) -> None:
        """`engine` holds a verified version: requests may reach it. Raises ReceiverLost if it was lost meanwhile."""
        incarnation = engine.incarnation
        if engine.standing is Standing.JOINING:
            await self.keeper.add(engine)
            # Lost meanwhile, it may even be back by now, with other weights and at another URL.
            if engine.standing is Standing.JOINING and engine.incarnation == incarnation:
                engine.standing = Standing.MEMBER
                self.restarts[engine.name].serves()
                self.changed()
        if engine.standing is not Standing.MEMBER:
            raise ReceiverLost(
                f"engine {engine.name} was lost before it could serve", code="engine.lost", about=engine.name
            )

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Take `engine` out because of `error`; returns when no new request can reach it. Twice is once."""
        if engine not in self.candidates():
            return
        self.note(f"engine {engine.name} is quarantined: {first_line(error)}")
        self.on_lost(engine.name, error)
        self.lost += 1
        engine.lose(error)
        self.restarts[engine.name].lost()
        self.changed()
        removal = self.spawn(self.keeper.remove(engine.url))
        self.spawn(self._recover(engine, error, removal))
        await asyncio.shield(removal)

    async def _recover(self, engine: EngineHandle, error: SlimxError, removal: asyncio.Task[None]) -> None:
        """End the lost engine and start it again, as often as it may be."""
        async with self.turn.ending():
            await removal
            await self.before_ending(error)
            await engine.stop(grace_s=0)
        restarts = self.restarts[engine.name]
        while restarts.left:
            await asyncio.sleep(restarts.pause)
            async with self.turn.starting():
                try:
                    with restarts.attempt(error):
                        await engine.start(self.start_deadline_s)
                except SlimxError as problem:
                    error = problem
                    continue
                self.changed()
                return
        engine.standing = Standing.GONE
        self.changed()
        if not self._every_role([other for other in self.engines if other.standing is not Standing.GONE]):
            role = engine.spec.role
            which = "engine" if role == "regular" else f"{role} engine"
            told = describe_restarts(self.history())
            self.fail(
                PartLost(
                    f"no {which} is left, and none may be started again (rollout.health.restarts is "
                    f"{self.health.restarts}{told and f': {told}'}); the last one lost: {error}",
                    code="engines.gone",
                    about=engine.name,
                )
            )

    # Waiting ----------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> bool:
        """True while an engine of each role runs."""
        return self._every_role(self.candidates())

    async def available(self) -> None:
        """Wait until an engine runs. Raises SlimxError if none will, DeadlineError if it takes too long."""
        await self._until(lambda: self.run)

    async def starved(self) -> None:
        """Wait until no engine serves but one could, after a publication. Raises SlimxError when none ever will.

        Where prompts and samples are computed by different servers, it takes one of either to serve.
        """
        await self._until(lambda: not self._every_role(self.members()) and self.run)

    async def back(self) -> None:
        """Wait until an engine waits for a publication. Raises SlimxError when the run cannot go on."""
        await self._until(lambda: bool(self.joining()))

    def failure(self) -> SlimxError | None:
        """Why the run cannot go on; None while it can."""
        return self._failure

    async def failed(self) -> None:
        """Wait until the run cannot go on, and raise why."""
        await self._until(lambda: False)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if condition():
                return
            await self._change.wait()

    # Health -----------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look at engines and router from now on, every `health.interval` seconds."""
        for engine in self.engines:
            self.spawn(self._watch(engine))
        self.spawn(self.keeper.watch())

    async def look(self) -> None:
        """Look at router and engines now, and return when the dead ones are out of the router. For whoever lost a
        request: calls that come together share one look.

        Where all of them live, an engine may still fail every request that it gets: each is asked for a token."""
        if self._look is None or self._look.done():
            self._look = self.spawn(self._look_once())
        await asyncio.shield(self._look)

    async def _look_once(self) -> None:
        if await self.keeper.look():
            return
        ended = await asyncio.gather(*(self._quarantine_if_ended(engine) for engine in self.candidates()))
        if not any(ended):
            await asyncio.gather(*(self._quarantine_if_useless(engine) for engine in self.members()))

    async def _quarantine_if_useless(self, engine: EngineHandle) -> None:
        """Quarantine an engine that twice does not do what requests ask of it, although it serves.

        One that is paused, for a publication, answers nothing and is not asked."""
        if self.probe is None or engine.spec.role != "regular":
            return
        incarnation, error = engine.incarnation, None
        for _ in range(2):
            try:
                if not await engine.perform("serves", None):
                    return
                async with asyncio.timeout(self.health.timeout):
                    await self.probe(engine)
                return
            except TimeoutError:
                error = DeadlineError("a token", self.health.timeout, f"engine {engine.name}")
            except SlimxError as problem:
                error = problem
        with suppress(SlimxError):
            # A server whose scheduler has died breaks connections for a second before it ends itself.
            if engine.incarnation != incarnation or await self._quarantine_if_ended(engine):
                return
            if await engine.perform("serves", None):
                said = f"engine {engine.name} fails requests: {error}; log {engine.log}"
                await self.quarantine(engine, ReceiverLost(said, code="engine.useless", about=engine.name))

    async def _quarantine_if_ended(self, engine: EngineHandle) -> bool:
        incarnation = engine.incarnation
        if (end := await engine.ended()) is None or engine.incarnation != incarnation:
            return False
        await self.quarantine(engine, ReceiverLost(end, code="engine.ended", about=engine.name))
        return True

    async def _watch(self, engine: EngineHandle) -> None:
        failures, pace = 0, Pace(self.health.interval)
        while True:
            await pace.round()
            if engine not in self.candidates():
                failures = 0
                continue
            incarnation = engine.incarnation
            try:
                limit = self.health.timeout
                await engine.perform("check_health", None, limit, deadline_s=limit + ANSWER_S)
                failures = 0
            except SlimxError as error:
                failures += 1
                if engine.incarnation != incarnation or await self._quarantine_if_ended(engine):
                    failures = 0
                elif failures >= self.health.threshold:
                    await self.quarantine(engine, error)

    # Bookkeeping ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Engines that serve, that are out now, and how often one was lost or came back in this run."""
        restarts = [restart for each in self.restarts.values() for restart in each.history]
        return {
            "engines/serving": float(len(self.members())),
            "engines/quarantined": float(len(self.engines) - len(self.candidates())),
            "engines/lost": float(self.lost),
            "engines/restarted": float(sum(not restart.error for restart in restarts)),
            "engines/router_restarts": float(sum(not restart.error for restart in self.keeper.restarts.history)),
            "engines/outage_seconds": self.outage.seconds,
        }

    def history(self) -> list[Restart]:
        """All restarts of engines and router, in the order in which they began."""
        parts = [*self.restarts.values(), self.keeper.restarts]
        return sorted((restart for part in parts for restart in part.history), key=lambda restart: restart.at)

    def awaited(self) -> dict[str, Any] | None:
        """Reason for which rollouts wait, for `slimx status`: {what, since: Unix seconds}; None: they do not wait."""
        if not self.outage.lasts:
            return None
        if not self.keeper.up:
            what = "the router, which is started again"
        elif self.run:
            what = "a publication to an engine that is back"
        else:
            out = ", ".join(engine.name for engine in self.engines if engine.standing is Standing.OUT)
            what = f"an engine ({out}), which is started again"
        return {"what": what, "since": self.outage.since}

    async def stop(self) -> None:
        """End watchers and recoveries."""
        await cancelled(*self._tasks)

    async def _lose_patience(self) -> None:
        limit = self.health.outage_deadline
        await self.turn.come()  # none can come back before
        await asyncio.sleep(limit)
        names = ", ".join(engine.name for engine in self.engines)
        self.fail(DeadlineError("an engine to come back", limit, f"engines {names} (rollout.health.outage_deadline)"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do `work` in a task that ends with the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A mistake of ours must reach the loop, not vanish in a task.
            self.fail(
                error
                if isinstance(error, SlimxError)
                else SlimxError(f"{type(error).__name__}: {error}", code="engines.mistake", about=type(error).__name__)
            )

    def fail(self, error: SlimxError) -> None:
        """The run cannot go on because of `error`."""
        if self._failure is None:
            self._failure = error
        self.changed()

    def changed(self) -> None:
        """Tell everything that follows the engines that one of them, or the router, was lost or is back."""
        self.epoch += 1
        serve = self.keeper.up and self._every_role(self.members())
        self._served = self._served or serve
        if serve:
            self.outage.end()
        elif self._served:
            self.outage.begin()
        run = self.run
        self._ran = self._ran or run
        if self._patience is None and self._ran and not run:
            self._patience = self.spawn(self._lose_patience())
        elif self._patience is not None and run:
            self._patience.cancel()
            self._patience = None
        self.on_change()
        self._change.set()
        self._change = asyncio.Event()


class Joining:
    """The engines of a membership that no version reached yet, for a publication to them alone."""

    def __init__(self, members: Membership):
        self.quarantine, self.admit, self.candidates = members.quarantine, members.admit, members.joining
        self._members = members

    @property
    def epoch(self) -> int:
        return self._members.epoch
