"""Handle through which the training loop and the publisher call one engine; it remains valid when the engine
restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
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


class MemberState(StrEnum):
    """State of an engine as a member of the run, which decides whether it receives requests and publications.

    The state of the engine's server is separate: `slimx.engines.server.engine.State`."""

    OUT = "out"
    """The engine has not been started or is being restarted; it receives neither requests nor publications."""
    JOINING = "joining"
    """The engine's server runs, but with weights that were not published; the engine takes part in the next
    publication, and receives requests only after that."""
    MEMBER = "member"
    """The engine has a verified version of the weights and is registered with the router."""
    GONE = "gone"
    """The engine is permanently lost, because it has no restarts left."""

    @property
    def runs(self) -> bool:
        """True while the engine's server runs, whether or not the router sends requests to it."""
        return self in (MemberState.JOINING, MemberState.MEMBER)


class EngineHandle:
    """Handle of one engine for the training loop and the publisher. It remains valid across restarts of the engine."""

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

        `spec`: specification of the server. `make_actor`: factory of actors of `slimx.engines.server.engine.Engine`.
        `log`: path of the server's log, for messages. `deadline_s`: deadline for one call in seconds. `nodes`: number
        of nodes that the server spans."""
        self.make_actor = make_actor
        self.log = log
        self.deadline_s = deadline_s
        self.nodes = nodes
        self.spec = spec
        """Specification of the server at its last start, with address and ports."""
        self.actor: Actor = make_actor()
        """Ray actor of the engine; None after it was killed, until the next start."""
        self.state = MemberState.OUT
        self.incarnation = 0
        self.attestation: list[Json] = []
        """Attestation of each rank at the last start: slimx's version, parallel sizes, kernels, ...; empty if the
        server attests nothing."""
        self._reason: SlimxError | None = None
        """Error that caused the loss of the engine since its last start; None if it was not lost."""
        self._lost = asyncio.Event()
        """Set when the engine is lost, so that pending calls fail at once."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.spec.url

    # Life -----------------------------------------------------------------------------------------------------------

    async def start(self, deadline_s: float) -> None:
        """Starts a server within `deadline_s` seconds and sets the state to JOINING.

        If that fails, the process tree and the actor are killed: the cause may be in the actor's process, such as
        exhausted file descriptors, and the next start creates another actor."""
        if self.actor is None:
            self.actor = self.make_actor()
        self.incarnation += 1
        self._reason = None
        self._lost = asyncio.Event()
        try:
            result = await self._wait("the start", self.actor.start.remote(deadline_s), deadline_s + STOP_S)
        except BaseException:
            await self.stop(grace_s=0, keep_actor=False)
            raise
        self.spec, self.attestation = result
        self.state = MemberState.JOINING

    def mark(self, text: str) -> None:
        """Writes a separator line with `text` into the engine's log, and returns without waiting for the write."""
        if self.actor is not None:
            self.actor.mark.options(num_returns=0).remote(text)

    def lose(self, error: SlimxError) -> None:
        """Sets the state to OUT because of `error`: pending calls fail with this error, and late responses are
        discarded."""
        self.state = MemberState.OUT
        self._reason = self._reason or error
        self._lost.set()

    async def stop(self, grace_s: float = 10.0, *, keep_actor: bool = True) -> None:
        """Stops the server and its process tree, and kills them if they have not exited after `grace_s` seconds.

        The actor is killed as well if `keep_actor` is False, or if it fails or does not respond; in the latter case,
        the server's guard process, which watches the actor, kills the tree."""
        self.state = MemberState.OUT
        actor = self.actor  # a concurrent stop may set it to None
        if actor is None:
            return
        with suppress(SlimxError):
            await self._wait("its state", actor.serves.remote(), ANSWER_S)
            await self._wait("the stop", actor.stop.remote(grace_s), grace_s + STOP_S)
            if keep_actor:
                return
        await kill([actor])
        if self.actor is actor:
            self.actor = None

    async def ended(self) -> str | None:
        """Returns a description of how the server or the actor ended; None if both are running or there is no
        response."""
        try:
            return await self._wait("the status of its process", self._living.ended.remote(), ANSWER_S)
        except (ActorDied, ReceiverLost) as error:
            return str(error)
        except SlimxError:
            return None

    async def perform(self, verb: str, epoch: int | None, *arguments: object, deadline_s: float | None = None) -> Any:
        """Makes the engine perform `verb` and returns the result.

        `verb`: a method of a publication (`slimx.reshard.parties.Receiver`), for the publication that began in
        membership `epoch`, or any method of `slimx.engines.server.engine.Engine` if `epoch` is None. `deadline_s`: if
        None, the deadline passed to the constructor applies. Raises ReceiverLost if the engine or its actor has died or
        does not respond in time."""
        deadline_s = deadline_s or self.deadline_s
        reference = self._living.perform.remote(verb, epoch, deadline_s, *arguments)
        return await self._result(verb, reference, deadline_s)

    # Calls ------------------------------------------------------------------------------------------------------------

    @property
    def _living(self) -> Actor:
        """Ray actor of the engine. Raises ReceiverLost if the engine is lost."""
        self._check_not_lost()
        if self.actor is None:
            raise ReceiverLost(
                f"engine {self.name} is not running; wait until slimx has restarted the engine",
                code="engine.not_running",
                about=self.name,
            )
        return self.actor

    def _check_not_lost(self) -> None:
        if self._reason is not None:
            raise ReceiverLost(str(self._reason), code="engine.lost", about=self.name)

    async def _result[T](self, operation: str, reference: Awaitable[T], deadline_s: float) -> T:
        """Waits for the result of a call, or until the engine is lost. `operation`: description of the call in
        messages.

        Raises ReceiverLost if the engine is lost, its actor has died, or the deadline passes."""
        future, _ = await race(self._wait(operation, reference, deadline_s), self._lost.wait())
        self._check_not_lost()
        assert future is not None  # the engine was not lost, so the call must have ended
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
    """Returns the kernels that a server's first rank attested, as text: "field value, ...", in the order of the
    attestation."""
    backends = attestation[0].get("backends", {}) if attestation else {}
    return ", ".join(f"{field} {value}" for field, value in backends.items())
