"""One engine as the loop and the publisher see it, through all its restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from slimx.cluster.waiting import ActorDied, gather, kill
from slimx.engines.server.server import ANSWER_S, STOP_S
from slimx.engines.server.spec import EngineSpec
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.parties import ReceiverLost
from slimx.runtime.tasks import race


class Standing(StrEnum):
    """The standing of an engine in the run, which it has without any process; what its server may do is the `State` of
    `slimx.engines.server.engine`."""

    OUT = "out"
    """Not started yet, or being stopped and started again: no request and no publication reaches it."""
    JOINING = "joining"
    """Its server runs with weights that nobody published: it gets the next publication, and no request before."""
    MEMBER = "member"
    """It holds a verified version and is in the router."""
    GONE = "gone"
    """Lost for good: its restarts are used up."""

    @property
    def runs(self) -> bool:
        """True while its server runs, in the router or not."""
        return self in (Standing.JOINING, Standing.MEMBER)


class EngineHandle:
    """One engine as the loop and the publisher see it, through all its restarts."""

    def __init__(
        self,
        spec: EngineSpec,
        make_actor: Callable[[], Any],
        log: Path,
        deadline_s: float,
        *,
        nodes: int = 1,
    ):
        """`make_actor` gives a new actor of `slimx.engines.server.engine.Engine`. `deadline_s`: seconds for one call to
        it. `nodes`: machines that the server spans."""
        self.make_actor, self.log, self.deadline_s, self.nodes = make_actor, log, deadline_s, nodes
        self.spec = spec
        """Specification of the last start."""
        self.actor: Any = make_actor()
        """None after it had to be killed, until the next start."""
        self.standing = Standing.OUT
        self.incarnation = 0
        self.attestation: list[dict[str, Any]] = []
        """By rank what the server attested when it started last; of one that attests nothing, nothing."""
        self._reason: SlimxError | None = None
        """Why this incarnation is lost, once it is."""
        self._lost = asyncio.Event()
        """Set then: nothing waits for its answers any more."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.spec.url

    # Life -----------------------------------------------------------------------------------------------------------

    async def start(self, deadline_s: float) -> None:
        """Start a server. JOINING afterwards; on failure its tree is ended."""
        if self.actor is None:
            self.actor = self.make_actor()
        self.incarnation += 1
        self._reason, self._lost = None, asyncio.Event()
        try:
            started = await self._wait("the start", self.actor.start.remote(deadline_s), deadline_s + STOP_S)
        except BaseException:
            await self.stop(grace_s=0)
            raise
        self.spec, self.attestation = started
        self.standing = Standing.JOINING

    def mark(self, text: str) -> None:
        """Write into its log what the lines that follow belong to; waits for nothing."""
        if self.actor is not None:
            self.actor.mark.options(num_returns=0).remote(text)

    def lose(self, error: SlimxError) -> None:
        """Take it out of the run: calls that are under way fail with `error`, and late answers are dropped."""
        self.standing = Standing.OUT
        self._reason = self._reason or error
        self._lost.set()

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the server with its whole tree. If its actor is silent, or does not do it, the actor is killed, and the
        server's guard, which watches the actor, ends the tree."""
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
        """The end of server or actor in words; None while they run, or do not say."""
        try:
            return await self._wait("the look at its process", self._living.ended.remote(), ANSWER_S)
        except (ActorDied, ReceiverLost) as error:
            return str(error)
        except SlimxError:
            return None

    async def perform(self, verb: str, epoch: int | None, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Have the engine do a verb of a publication (`slimx.reshard.parties.Receiver`) in membership `epoch`; with
        epoch None any method of `slimx.engines.server.engine.Engine`, at any time.

        Raises ReceiverLost if the engine or its actor is gone, or does not answer in time.
        """
        deadline_s = deadline_s or self.deadline_s
        answer = self._living.perform.remote(verb, epoch, deadline_s, *arguments)
        return await self._answer(verb, answer, deadline_s)

    # Calls ------------------------------------------------------------------------------------------------------------

    @property
    def _living(self) -> Any:
        """The actor. Raises ReceiverLost if it is gone, or its server lost."""
        self._check_kept()
        if self.actor is None:
            raise ReceiverLost(f"engine {self.name} is not running", code="engine.not_running", about=self.name)
        return self.actor

    def _check_kept(self) -> None:
        if self._reason is not None:
            raise ReceiverLost(str(self._reason), code="engine.lost", about=self.name)

    async def _answer(self, what: str, reference: Any, deadline_s: float) -> Any:
        """Wait for an answer, unless the engine is lost meanwhile. Raises ReceiverLost if it, or its actor, is gone."""
        answer, _ = await race(self._wait(what, reference, deadline_s), self._lost.wait())
        self._check_kept()
        try:
            return answer.result()
        except (ActorDied, DeadlineError) as error:
            raise ReceiverLost(str(error), code="engine.silent", about=self.name) from None

    async def _wait(self, what: str, reference: Any, deadline_s: float) -> Any:
        (out,) = await gather(
            [reference],
            what=f"{what} of engine {self.name}",
            holders=[f"engine {self.name}"],
            deadline_s=deadline_s,
            logs=[self.log],
        )
        return out


def kernels_of(attestation: list[dict[str, Any]]) -> str:
    """Kernels of a server's first rank as "field value, ...", in the order in which they are attested."""
    chosen = attestation[0].get("backends", {}) if attestation else {}
    return ", ".join(f"{field} {value}" for field, value in chosen.items())
