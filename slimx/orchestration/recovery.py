"""Which engines take part in the run: losses are found, isolated and repaired while the run goes on.

    start --> JOINING --a verified publication--> MEMBER --failed, late, dead--> OUT --restarted--> JOINING
                                                                                  |
                                                                                  +--restarts used up--> GONE

An engine that fails in any way leaves the router at once, its whole process tree is killed (a half-updated server gets
no time to answer anything), and it is started again in the background. It serves again only after a complete, verified
publication. The run ends only when no engine is left that could come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slimx.config.engines import Health
from slimx.errors import DeadlineError, SlimxError
from slimx.orchestration.engine_actor import STOP_S
from slimx.orchestration.engine_handle import EngineHandle, Standing
from slimx.orchestration.waiting import first_line
from slimx.reshard.parties import ReceiverLost
from slimx.rollout.router import Router


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
    ):
        """`start_deadline_s`: seconds for one start of an engine. `note` is told what happens to engines."""
        self.engines, self.router, self.health = engines, router, health
        self.start_deadline_s, self.note = start_deadline_s, note
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever an engine's standing may have changed."""
        self.epoch = 0
        """Rises with every change of who is a candidate or a member."""
        self.lost = self.restarted = 0
        """Engines lost and engines started again, in this run."""
        self._failure: SlimxError | None = None
        """Why the run cannot go on."""
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        """Watchers and recoveries: they end with the run."""
        self._look: asyncio.Task[None] | None = None

    # Who takes part ---------------------------------------------------------------------------------------------------

    def candidates(self) -> list[EngineHandle]:
        """Engines that run, in the router or not."""
        return [engine for engine in self.engines if engine.standing in (Standing.JOINING, Standing.MEMBER)]

    def joining(self) -> list[EngineHandle]:
        """Engines that run and wait for a publication."""
        return [engine for engine in self.engines if engine.standing is Standing.JOINING]

    def members(self) -> list[EngineHandle]:
        """Engines in the router."""
        return [engine for engine in self.engines if engine.standing is Standing.MEMBER]

    def _every_role(self, engines: Sequence[EngineHandle]) -> bool:
        """Whether `engines` can serve without the others."""
        return {engine.role for engine in engines} == {engine.role for engine in self.engines}

    async def admit(self, engine: EngineHandle) -> None:
        """`engine` holds a verified version: requests may reach it. Raises ReceiverLost if it was lost meanwhile."""
        url, incarnation = engine.url, engine.incarnation
        if engine.standing is Standing.JOINING:
            await self.router.add(url, role=engine.role, bootstrap_port=engine.bootstrap_port)
            # Lost meanwhile, it may even be back by now, with other weights and at another URL.
            if engine.standing is Standing.JOINING and engine.incarnation == incarnation:
                engine.standing = Standing.MEMBER
                self._changed()
            else:
                await self.router.remove(url)
        if engine.standing is not Standing.MEMBER:
            raise ReceiverLost(f"engine {engine.name} was lost before it could serve")

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Take `engine` out because of `error`; returns when no new request can reach it. Twice is once."""
        if engine not in self.candidates():
            return
        self.note(f"engine {engine.name} is quarantined: {first_line(error)}")
        self.lost += 1
        engine.lose(error)
        self._changed()
        removal = self._spawn(self._remove(engine.url))
        self._spawn(self._recover(engine, error, removal))
        await asyncio.shield(removal)

    async def _remove(self, url: str) -> None:
        try:
            await self.router.remove(url)
        except SlimxError as error:
            self._fail(error)  # without its router a run cannot keep requests from an engine

    async def _recover(self, engine: EngineHandle, error: SlimxError, removal: asyncio.Task[None]) -> None:
        """End the lost engine and start it again, as often as it may be."""
        await removal
        await engine.stop(grace_s=0)
        while engine.restarts < self.health.restarts:
            engine.restarts += 1
            self.note(f"engine {engine.name}: restart {engine.restarts} of {self.health.restarts}")
            try:
                await engine.start(self.start_deadline_s)
            except SlimxError as problem:
                error = problem
                continue
            self.restarted += 1
            self._changed()
            return
        engine.standing = Standing.GONE
        self._changed()
        if not self._every_role([other for other in self.engines if other.standing is not Standing.GONE]):
            which = "engine" if engine.role == "regular" else f"{engine.role} engine"
            self._fail(
                SlimxError(
                    f"no {which} is left, and none may be started again (rollout.health.restarts is "
                    f"{self.health.restarts}); the last one lost: {error}"
                )
            )

    # Waiting ----------------------------------------------------------------------------------------------------------

    async def available(self) -> None:
        """Wait until an engine runs. Raises SlimxError if none will, DeadlineError if it takes too long."""
        limit = (self.health.restarts + 1) * (self.start_deadline_s + 2 * STOP_S)
        try:
            async with asyncio.timeout(limit):
                await self._until(lambda: self._every_role(self.candidates()))
        except TimeoutError:
            names = ", ".join(engine.name for engine in self.engines)
            raise DeadlineError("an engine to come back", limit, f"engines {names}") from None

    async def starved(self) -> None:
        """Wait until no engine serves but one could, after a publication. Raises SlimxError when none ever will.

        Where prompts and samples are computed by different servers, it takes one of either to serve.
        """
        await self._until(lambda: not self._every_role(self.members()) and self._every_role(self.candidates()))

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
            self._spawn(self._watch(engine))
        self._spawn(self._watch_router())

    async def look(self) -> None:
        """Look at every engine's process now, and return when the dead ones are out of the router. For whoever lost a
        request: calls that come together share one look."""
        if self._look is None or self._look.done():
            self._look = self._spawn(self._look_once())
        await asyncio.shield(self._look)

    async def _look_once(self) -> None:
        await asyncio.gather(*(self._quarantine_if_ended(engine) for engine in self.candidates()))

    async def _quarantine_if_ended(self, engine: EngineHandle) -> bool:
        incarnation = engine.incarnation
        if (end := await engine.ended()) is None or engine.incarnation != incarnation:
            return False
        await self.quarantine(engine, ReceiverLost(end))
        return True

    async def _watch(self, engine: EngineHandle) -> None:
        failures = 0
        while True:
            await asyncio.sleep(self.health.interval)
            if engine not in self.candidates():
                failures = 0
                continue
            incarnation = engine.incarnation
            try:
                await engine.check_health(self.health.timeout)
                failures = 0
            except SlimxError as error:
                failures += 1
                if engine.incarnation != incarnation or await self._quarantine_if_ended(engine):
                    failures = 0
                elif failures >= self.health.threshold:
                    await self.quarantine(engine, error)

    async def _watch_router(self) -> None:
        while True:
            await asyncio.sleep(self.health.interval)
            if (end := self.router.ended()) is not None:
                self._fail(SlimxError(end))
                return

    # Bookkeeping ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Engines that serve, that are out now, and how often one was lost or came back in this run."""
        out = sum(engine.standing in (Standing.OUT, Standing.GONE) for engine in self.engines)
        return {
            "engines/serving": float(len(self.members())),
            "engines/quarantined": float(out),
            "engines/lost": float(self.lost),
            "engines/restarted": float(self.restarted),
        }

    async def stop(self) -> None:
        """End watchers and recoveries."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A mistake of ours must reach the loop, not vanish in a task.
            self._fail(error if isinstance(error, SlimxError) else SlimxError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: SlimxError) -> None:
        if self._failure is None:
            self._failure = error
        self._changed()

    def _changed(self) -> None:
        self.epoch += 1
        self.on_change()
        self._change.set()
        self._change = asyncio.Event()
