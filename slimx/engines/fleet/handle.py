"""Handle of one engine for the training loop and the publisher, valid across all restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from slimx.cluster.place import Actor
from slimx.cluster.waiting import ActorDied, gather, kill
from slimx.engines.server.server import ANSWER_S, STOP_S
from slimx.engines.server.spec import EngineSpec
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.reshard.parties import ReceiverLost
from slimx.runtime.tasks import race


class Standing(StrEnum):
    """The standing of an engine in the run, independent of its process; the state of its server is
    `slimx.engines.server.engine.State`."""

    OUT = "out"
    """Not started, or being restarted: receives no requests and no publications."""
    JOINING = "joining"
    """Its server runs with unpublished weights: receives the next publication, and no requests before it."""
    MEMBER = "member"
    """Holds a verified version and is registered with the router."""
    GONE = "gone"
    """Permanently lost: its restarts are used up."""

    @property
    def runs(self) -> bool:
        """True while its server runs, whether or not it is in the router."""
        return self in (Standing.JOINING, Standing.MEMBER)


class EngineHandle:
    """One engine as the loop and the publisher see it, across all its restarts."""

    def __init__(
        self,
        spec: EngineSpec,
        make_actor: Callable[[], Actor],
        log: Path,
        deadline_s: float,
        *,
        nodes: int = 1,
    ):
        """Creates the engine's actor.

        `make_actor`: factory of actors of `slimx.engines.server.engine.Engine`. `deadline_s`: deadline of one call, in
        seconds. `nodes`: number of nodes that the server spans.
        """
        self.make_actor = make_actor
        self.log = log
        self.deadline_s = deadline_s
        self.nodes = nodes
        self.spec = spec
        """Specification of the last start."""
        self.actor: Actor = make_actor()
        """None from when it was killed until the next start."""
        self.standing = Standing.OUT
        self.incarnation = 0
        self.attestation: list[Json] = []
        """Attestation of each rank at the last start; empty if the server attests nothing."""
        self._reason: SlimxError | None = None
        """Error by which this incarnation was lost, if any."""
        self._lost = asyncio.Event()
        """Set when this incarnation is lost: pending calls end."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.spec.url

    # Life -----------------------------------------------------------------------------------------------------------

    async def start(self, deadline_s: float) -> None:
        """Starts a server. JOINING afterwards; on failure its process tree is ended."""
        if self.actor is None:
            self.actor = self.make_actor()
        self.incarnation += 1
        self._reason = None
        self._lost = asyncio.Event()
        try:
            result = await self._wait("the start", self.actor.start.remote(deadline_s), deadline_s + STOP_S)
        except BaseException:
            await self.stop(grace_s=0)
            raise
        self.spec, self.attestation = result
        self.standing = Standing.JOINING

    def mark(self, text: str) -> None:
        """Writes a separator line with `text` into the engine's log, without waiting."""
        if self.actor is not None:
            self.actor.mark.options(num_returns=0).remote(text)

    def lose(self, error: SlimxError) -> None:
        """Marks the engine lost: pending calls fail with `error`, and late responses are discarded."""
        self.standing = Standing.OUT
        self._reason = self._reason or error
        self._lost.set()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ends the server with its process tree. If the actor does not respond or fails, it is killed, and the server's
        guard, which watches the actor, ends the tree."""
        self.standing = Standing.OUT
        if self.actor is None:
            return
        try:
            await self._wait("its state", self.actor.serves.remote(), ANSWER_S)
            await self._wait("the stop", self.actor.stop.remote(grace_s), grace_s + STOP_S)
        except SlimxError:
            await kill([self.actor])
            self.actor = None

    async def ended(self) -> str | None:
        """Returns how the server or the actor ended, or None while they run or do not respond."""
        try:
            return await self._wait("the look at its process", self._living.ended.remote(), ANSWER_S)
        except (ActorDied, ReceiverLost) as error:
            return str(error)
        except SlimxError:
            return None

    async def perform(self, verb: str, epoch: int | None, *arguments: object, deadline_s: float | None = None) -> Any:
        """Calls a verb of a publication (`slimx.reshard.parties.Receiver`) in membership `epoch`, or any method of
        `slimx.engines.server.engine.Engine` if `epoch` is None.

        Raises ReceiverLost if the engine or its actor is gone, or does not respond in time.
        """
        deadline_s = deadline_s or self.deadline_s
        reference = self._living.perform.remote(verb, epoch, deadline_s, *arguments)
        return await self._result(verb, reference, deadline_s)

    # Calls ------------------------------------------------------------------------------------------------------------

    @property
    def _living(self) -> Actor:
        """The actor. Raises ReceiverLost if it or its server is lost."""
        self._check_not_lost()
        if self.actor is None:
            raise ReceiverLost(f"engine {self.name} is not running", code="engine.not_running", about=self.name)
        return self.actor

    def _check_not_lost(self) -> None:
        if self._reason is not None:
            raise ReceiverLost(str(self._reason), code="engine.lost", about=self.name)

    async def _result[T](self, operation: str, reference: Awaitable[T], deadline_s: float) -> T:
        """Waits for a result, or until the engine is lost. Raises ReceiverLost if it or its actor is gone."""
        future, _ = await race(self._wait(operation, reference, deadline_s), self._lost.wait())
        self._check_not_lost()
        assert future is not None  # the engine is not lost, so the call has ended
        try:
            return future.result()
        except (ActorDied, DeadlineError) as error:
            raise ReceiverLost(str(error), code="engine.silent", about=self.name) from None

    async def _wait[T](self, operation: str, reference: Awaitable[T], deadline_s: float) -> T:
        (result,) = await gather(
            [reference],
            what=f"{operation} of engine {self.name}",
            holders=[f"engine {self.name}"],
            deadline_s=deadline_s,
            logs=[self.log],
        )
        return result


def kernels_of(attestation: list[Json]) -> str:
    """Returns the kernels of a server's first rank as "field value, ...", in the order of the attestation."""
    backends = attestation[0].get("backends", {}) if attestation else {}
    return ", ".join(f"{field} {value}" for field, value in backends.items())
