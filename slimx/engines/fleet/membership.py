"""Tracks which engines of a run serve; detects failed engines, isolates them and restarts them while the run continues.

    start --> JOINING --a verified publication--> MEMBER --failed, late, dead--> OUT --restarted--> JOINING
                                                                                  |
                                                                                  +--restarts used up--> GONE

A failed engine leaves the router, its process tree is killed (a partly updated server must not serve anything), and it
is restarted in the background. It serves again only after a complete, verified publication. While none serves there is
an outage: requests wait, and deadlines are suspended. The run ends only when no engine is left that could restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import chain

from slimx.cluster.restarts import Restart, Restarts, describe_restarts
from slimx.config.sections.engines import Health
from slimx.engines.fleet.handle import EngineHandle, MemberState
from slimx.engines.fleet.router_keeper import RouterKeeper
from slimx.engines.outage import EnginePhase, Outage
from slimx.engines.server.router import Router
from slimx.engines.server.server import ANSWER_S
from slimx.errors import DeadlineError, PartLost, SlimxError, counted, first_line
from slimx.json_types import Json
from slimx.reshard.parties import ReceiverLost
from slimx.runtime.tasks import Ticker, cancelled


async def _nothing(error: SlimxError) -> None:
    """Does nothing; default of `Membership.before_ending`."""


class Membership:
    """All engines of a group and their states, for the publisher (`slimx.reshard.parties.Members`) and the training
    loop."""

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
        """Prepares the counts of restarts and the keeper of `router`; starts nothing.

        `health`: section rollout.health. `start_deadline_s`: deadline for starting an engine or the router, in seconds.
        `note`: called with a line of text for every event. `record`: called with every restart. `pause_s`: seconds
        before the second consecutive restart of an engine or router."""
        self.engines = engines
        self.health = health
        self.start_deadline_s = start_deadline_s
        self.note = note

        def record_restart(restart: Restart) -> None:
            record(restart)
            self.on_change()

        def restarts(part: str) -> Restarts:
            return Restarts(part, health, note=note, record=record_restart, pause_s=pause_s)

        self.restarts = {engine.name: restarts(f"engine {engine.name}") for engine in engines}
        self.keeper = RouterKeeper(self, router, restarts("router"))
        self.engine_phase = EnginePhase()
        """Phases in which lost engines may be restarted on devices that they share with trainers."""
        self.outage = Outage()
        """Outages of this group: periods in which no engine or no router serves, after they have served before."""
        self.probe: Callable[[EngineHandle], Awaitable[None]] | None = None
        """Function that sends a typical request directly to an engine and raises SlimxError if it fails. If None, the
        health check alone decides whether an engine works."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after every restart and whenever an engine's state may have changed."""
        self.on_lost: Callable[[str, SlimxError], None] = lambda name, error: None
        """Called with the name of an engine that was lost, and the error."""
        self.before_ending: Callable[[SlimxError], Awaitable[None]] = _nothing
        """Awaited before the server of a lost engine is killed, with the error that caused the loss."""
        self.epoch = 0
        """Membership epoch: a number that increases whenever an engine or the router is lost or comes back."""
        self.lost = 0
        """Number of times that an engine was lost in this run."""
        self._failure: SlimxError | None = None
        """Error that prevents the run from continuing; None if it can continue."""
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that watch or recover engines; cancelled when the run ends."""
        self._look: asyncio.Task[None] | None = None
        self._ran = False  # True once engines of all roles have run
        self._served = False  # True once engines of all roles have served
        self._patience: asyncio.Task[None] | None = None
        """Task that ends the run if no engine has been restarted by the outage deadline; None while an engine of each
        role runs."""

    # Members ----------------------------------------------------------------------------------------------------------

    def candidates(self) -> list[EngineHandle]:
        """Returns the engines whose server runs, whether or not the router sends requests to them."""
        return [engine for engine in self.engines if engine.state.runs]

    def joining(self) -> list[EngineHandle]:
        """Returns the engines whose server is running and that are waiting for a publication."""
        return [engine for engine in self.engines if engine.state is MemberState.JOINING]

    def members(self) -> list[EngineHandle]:
        """Returns the engines to which the router sends requests."""
        return [engine for engine in self.engines if engine.state is MemberState.MEMBER]

    def _every_role(self, engines: Sequence[EngineHandle]) -> bool:
        """Returns True if `engines` have all roles of the group (regular, prefill, decode) and can thus serve alone."""
        return {engine.spec.role for engine in engines} == {engine.spec.role for engine in self.engines}

    async def admit(self, engine: EngineHandle) -> None:
        """Registers `engine`, which has a verified version, with the router. Raises ReceiverLost if it has since been
        lost."""
        incarnation = engine.incarnation
        if engine.state is MemberState.JOINING:
            await self.keeper.add(engine)
            # An engine lost meanwhile may have restarted already, with other weights and at another URL.
            if engine.state is MemberState.JOINING and engine.incarnation == incarnation:
                engine.state = MemberState.MEMBER
                self.restarts[engine.name].serves()
                self.changed()
        if engine.state is not MemberState.MEMBER:
            message = f"engine {engine.name} was lost before it could serve"
            raise ReceiverLost(message, code="engine.lost", about=engine.name)

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Removes `engine` from the router because of `error` and restarts it in the background. Does nothing if the
        engine is already lost. Once this method has returned, no new request can reach the engine."""
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
        """Kills a lost engine's server after its `removal` from the router, and restarts it as often as allowed."""
        async with self.engine_phase.stopping():
            await removal
            await self.before_ending(error)
            await engine.stop(grace_s=0)
        restarts = self.restarts[engine.name]
        while restarts.left:
            await asyncio.sleep(restarts.pause)
            async with self.engine_phase.starting():
                try:
                    with restarts.attempt(error):
                        await engine.start(self.start_deadline_s)
                except SlimxError as problem:
                    error = problem
                    continue
                self.changed()
                return
        engine.state = MemberState.GONE
        self.changed()
        if not self._every_role([other for other in self.engines if other.state is not MemberState.GONE]):
            role = engine.spec.role
            kind = "engine" if role == "regular" else f"{role} engine"
            limit = describe_restarts(self.health, self.history())
            self.fail(
                PartLost(
                    f"no {kind} is left, and all restarts ({limit}) are used up (last error: {error}); "
                    "find the cause in the engines' logs, and run the same command again to resume",
                    code="engines.gone",
                    about=engine.name,
                )
            )

    # Waiting ----------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> bool:
        """True while at least one engine of each role is running."""
        return self._every_role(self.candidates())

    async def available(self) -> None:
        """Waits until an engine of each role runs. Raises SlimxError if the run cannot continue."""
        await self._until(lambda: self.run)

    async def starved(self) -> None:
        """Waits until engines are running but cannot serve because weights must first be published to them. Raises
        SlimxError if the run cannot continue. With separate prefill and decode servers, serving needs an engine of each
        role."""
        await self._until(lambda: not self._every_role(self.members()) and self.run)

    async def back(self) -> None:
        """Waits until an engine is ready for a publication. Raises SlimxError if the run cannot continue."""
        await self._until(lambda: bool(self.joining()))

    def failure(self) -> SlimxError | None:
        """Returns the error that prevents the run from continuing, or None if it can continue."""
        return self._failure

    async def failed(self) -> None:
        """Waits until an error prevents the run from continuing, and raises that error."""
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
        """Starts checking the engines and the router every `health.interval` seconds."""
        for engine in self.engines:
            self.spawn(self._watch(engine))
        self.spawn(self.keeper.watch())

    async def look(self) -> None:
        """Checks the router and the engines now, after requests were lost. On return, the router sends no requests to
        engines that have ended.

        Concurrent calls share one check. Even if all processes are running, an engine may fail every request, so each
        engine is probed with one request (`probe`)."""
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
        """Quarantines an engine that fails two probe requests although it should serve.

        An engine that is paused for a publication cannot respond and is not probed."""
        if self.probe is None or engine.spec.role != "regular":
            return
        incarnation = engine.incarnation
        error: SlimxError | None = None
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
            # A server whose scheduler has died drops connections for a second before it ends itself.
            if engine.incarnation != incarnation or await self._quarantine_if_ended(engine):
                return
            if await engine.perform("serves", None):
                message = f"engine {engine.name} failed two probe requests ({error}): see its log {engine.log}"
                await self.quarantine(engine, ReceiverLost(message, code="engine.useless", about=engine.name))

    async def _quarantine_if_ended(self, engine: EngineHandle) -> bool:
        incarnation = engine.incarnation
        end = await engine.ended()
        if end is None or engine.incarnation != incarnation:
            return False
        await self.quarantine(engine, ReceiverLost(end, code="engine.ended", about=engine.name))
        return True

    async def _watch(self, engine: EngineHandle) -> None:
        failures = 0
        ticker = Ticker(self.health.interval)
        while True:
            await ticker.round()
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
                    checks = counted(failures, "failed health check")
                    message = f"slimx kills engine {engine.name} after {checks}: {error}"
                    await self.quarantine(engine, ReceiverLost(message, code=error.code, about=engine.name))

    # Bookkeeping ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Returns the metrics `engines/*`: the number of engines that serve, of engines whose server is not running, of
        losses and of restarts, and the total duration of outages."""
        router_restarts = sum(not restart.error for restart in self.keeper.restarts.history)
        restarts = sum(not restart.error for restart in self.history())
        return {
            "engines/serving": float(len(self.members())),
            "engines/quarantined": float(len(self.engines) - len(self.candidates())),
            "engines/lost": float(self.lost),
            "engines/restarted": float(restarts - router_restarts),
            "engines/router_restarts": float(router_restarts),
            "engines/outage_seconds": self.outage.seconds,
        }

    def history(self) -> list[Restart]:
        """Returns all restarts of engines and router in this run, sorted by start time."""
        parts = [*self.restarts.values(), self.keeper.restarts]
        return sorted(chain.from_iterable(part.history for part in parts), key=lambda restart: restart.at)

    def awaited(self) -> Json | None:
        """Returns the reason why rollouts wait during an outage, for `slimx status`, as {what: cause, since: Unix time
        at which the outage started}; None if there is no outage."""
        if not self.outage.lasts:
            return None
        if not self.keeper.up:
            cause = "the router, which is being restarted"
        elif self.run:
            cause = "a publication to a restarted engine"
        else:
            out = ", ".join(engine.name for engine in self.engines if engine.state is MemberState.OUT)
            cause = f"an engine ({out}), which is being restarted"
        return {"what": cause, "since": self.outage.since}

    async def stop(self) -> None:
        """Cancels all tasks that watch or recover engines."""
        await cancelled(*self._tasks)

    async def _lose_patience(self) -> None:
        limit = self.health.outage_deadline
        await self.engine_phase.wait()  # until then no engine may be restarted
        await asyncio.sleep(limit)
        names = ", ".join(engine.name for engine in self.engines)
        self.fail(DeadlineError("an engine to come back", limit, f"engines {names} (rollout.health.outage_deadline)"))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs `work` in a task that is cancelled when the run ends. An error in the task ends the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SlimxError):
            self.fail(error)
        elif error is not None:  # a programming error must end the run instead of being lost in a task
            kind = type(error).__name__
            self.fail(SlimxError(f"{kind}: {error}", code="engines.mistake", about=kind))

    def fail(self, error: SlimxError) -> None:
        """Ends the run with `error`, unless an earlier error has already ended it, and wakes all waiters."""
        if self._failure is None:
            self._failure = error
        self.changed()

    def changed(self) -> None:
        """Updates the epoch and the outage, and wakes waiters, after an engine or the router was lost or came back."""
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
    """Running engines without a published version. Implements `Members` for a publication to these engines alone."""

    def __init__(self, members: Membership):
        self._members = members
        self.quarantine = members.quarantine
        self.admit = members.admit
        self.candidates = members.joining

    @property
    def epoch(self) -> int:
        return self._members.epoch
