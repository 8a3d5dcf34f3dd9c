"""The server of an engine: starts and stops its processes, checks whether they run, and sends requests to it.
`slimx.engines.server.engine.Engine` adds the state machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from slimx import entry_points
from slimx.cluster.place import Placement
from slimx.engines.server.attestation import attested
from slimx.engines.server.http_calls import ControlClient
from slimx.engines.server.spec import EngineSpec, NodeShare, server_argv, server_env
from slimx.engines.transport import End
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.reshard.parties import ReceiverLost
from slimx.runtime.logs import marked
from slimx.runtime.ports import LOOPBACK, claimed_port, local_address
from slimx.runtime.process import SupervisedProcess
from slimx.runtime.tasks import AnyFuture, cancelled, first_of

ANSWER_S = 5.0
"""Maximum time in seconds that a healthy server takes to respond to a status call."""
ENDING_S = 3.0
"""Maximum time in seconds from a server's first refused connection until its process has exited."""
LEAVE_S = 5.0
"""Deadline in seconds for each call to an external server when a run starts or stops using it."""
LOOK_S = 2.0
"""Interval in seconds at which the other nodes of a multi-node server are checked while it starts."""
STOP_S = 30.0
"""Seconds to wait for a server's process tree to exit when the server is stopped."""
PORT = "engine.port"
"""Code of the error that is raised if another program took a server's HTTP port after the port was chosen and before
the server used it."""
PORTS = 3
"""Maximum number of ports that are tried for one start of a server, if other programs take the ports chosen before."""
PORT_TAKEN = "error while attempting to bind on address"
"""Text that uvicorn writes to the server's log if the port is in use."""


MACHINES = "slimx.machines"
"""Entry point group of classes that implement `Machines`."""


class Machines(Protocol):
    """Nodes of a multi-node server, except the first, on which this process runs."""

    count: int

    async def start(self, host: str, deadline_s: float) -> NodeShare:
        """Starts the server's processes on all nodes but the first, and returns the first node's `NodeShare`, with
        which the caller starts that node's processes. `host`: address of the first node."""

    async def ended(self, deadline_s: float) -> str | None:
        """Returns a description of how the first failed process ended; None if all processes are running or a node does
        not respond."""

    async def transport(self, method: str, messages: Sequence[object] | None = None) -> list[Any]:
        """Calls `method` of the transport's receiver on every node and returns the results.

        `messages`: one argument per node; None for calls without an argument."""

    async def stop(self, grace_s: float, deadline_s: float) -> None:
        """Ends the processes on these nodes, and kills those that have not exited after `grace_s` seconds; never
        raises."""


class EngineServer:
    """Server of one engine, through all its restarts. The object lives in a process on the server's first node, and
    starts, monitors and ends the server's processes. External servers are only sent requests; they are never started or
    ended."""

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        deadline_s: float = 60.0,
        *,
        network: str | None = LOOPBACK,
        places: Sequence[Placement] = (),
        make_end: Callable[[], End] | None = None,
    ) -> None:
        """Stores the settings that all starts share.

        `spec`: specification without ports and address. `deadline_s`: deadline for one call to the server in seconds.
        `network`: network of the server's address (`slimx.runtime.ports.local_address`). `places`: placements of a
        multi-node server's nodes other than the first. `make_end`: factory of the transport's receiver on a node; None
        if the transport has none."""
        self.planned = spec
        self.log_path = log_path
        self.deadline_s = deadline_s
        self.network = network
        self.host = local_address(network)
        self.places = places
        self.make_end = make_end
        self.end = None if make_end is None else make_end()
        self._claims: list[socket.socket] = []
        """Sockets that reserve the ports of the current start."""
        self.pending: set[AnyFuture] = set()
        """Pending requests to the server, which are cancelled when it is stopped."""
        self.reset(spec)

    def reset(self, spec: EngineSpec) -> None:
        """Clears the state that belongs to one start of the server; the next start uses `spec`."""
        self.spec = spec
        self.wire = ControlClient(spec.url, f"engine {spec.name}", spec.keys, self.deadline_s)
        self.process: SupervisedProcess | None = None
        """The server's process on this node; None for an external server."""
        self.nodes: Machines | None = None
        """The other nodes of a multi-node server; None for a server on one node."""
        self.attestation: list[Json] = []
        self._listens = False
        """True after the server has responded for the first time."""

    async def launch(self, deadline_s: float) -> None:
        """Starts a server, waits until it can generate, and checks the attestation of its slimx plugin.

        Each start uses a new port, so that messages to an earlier server cannot reach the new one. If another program
        takes the port while the server is still importing modules, the server is started again with another port, at
        most `PORTS` times in total."""
        for left in reversed(range(PORTS)):
            try:
                return await self._launch(deadline_s)
            except SlimxError as error:
                if error.code != PORT or not left:
                    raise
                await self.end_processes(ENDING_S)

    async def _launch(self, deadline_s: float) -> None:
        self.reset(self._placed())
        if self.places:
            make = entry_points.load(MACHINES, "ray")
            self.nodes = make(self.planned, self.log_path, self.network, self.places, self.make_end, self.deadline_s)
            self.spec = replace(self.spec, node=await self.nodes.start(self.host, deadline_s))
        if not self.spec.external:
            self.process = SupervisedProcess(
                f"engine {self.spec.name}",
                server_argv(self.spec),
                self.log_path,
                server_env(self.spec),
                self.spec.keys.to_bytes(),
            )
            self.process.start()
        if self.end is not None:
            await self.end.prepare(self.host, self.nodes)
        await self.wait_ready(deadline_s)

    def _placed(self) -> EngineSpec:
        """Returns the specification for the next start, with address and new ports. The specification of an external
        server is returned unchanged."""
        if self.planned.external:
            return self.planned
        before = self._claims
        port, claim = claimed_port(self.host)
        bootstrap_port = None
        self._claims = [claim]
        if self.planned.role == "prefill":
            bootstrap_port, claim = claimed_port(self.host)
            self._claims.append(claim)
        for claim in before:
            claim.close()
        return replace(self.planned, port=port, host=self.host, bootstrap_port=bootstrap_port)

    async def wait_ready(self, deadline_s: float) -> None:
        """Waits until the server can generate, and checks the attestation of its slimx plugin. Raises SlimxError if one
        of its processes ends first.

        An external server of a frozen model need not attest anything, because nothing is published to it."""
        await self.release(paused=True)
        waits = [self._wait_until_it_generates(deadline_s)]
        if self.nodes is not None:
            waits.append(self._wait_for_lost_node(self.nodes))
        await first_of(waits)
        self._listens = True
        if not (self.spec.external and self.spec.frozen):
            self.attestation = await attested(self.wire, self.spec, self.process)
        if not self.spec.external:
            # Excludes startup objects from garbage collection, because on the CPU each cache flush runs a full one.
            await self.wire.call("/freeze_gc")

    async def _wait_until_it_generates(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not await self._generates():
                    await asyncio.sleep(0.25)
        except TimeoutError:
            raise DeadlineError(
                f"engine {self.spec.name} at {self.spec.url} to become ready", deadline_s, f"log {self.log_path}"
            ) from None

    async def _generates(self) -> bool:
        """Returns True if the server is ready to generate. Raises SlimxError if the server has exited (the message
        shows the last lines of its log) or if another program uses its port."""
        end = None if self.process is None else self.process.ended()
        if end is not None:
            raise SlimxError(
                f"engine {self.spec.name} exited before it was ready: {end}", code="engine.died", about=self.spec.name
            )
        if self.process is not None and PORT_TAKEN in self.process.tail():
            # SGLang's process keeps running if its HTTP server could not start.
            raise SlimxError(
                f"engine {self.spec.name} cannot listen at {self.spec.url}, because another program uses the port; "
                "stop that program",
                code=PORT,
                about=self.spec.url,
            )
        try:
            await self.check_generation(30.0)
        except SlimxError:
            return False
        return True

    async def check_generation(self, deadline_s: float) -> None:
        """Raises SlimxError unless the server generates a token within `deadline_s` seconds; a healthy SGLang server
        needs about 1 s. A paused server does not respond."""
        await self.wire.call("/health_generate", method="GET", deadline_s=deadline_s)

    async def _wait_for_lost_node(self, nodes: Machines) -> None:
        while (end := await nodes.ended(ANSWER_S)) is None:
            await asyncio.sleep(LOOK_S)
        raise SlimxError(end)

    async def ended(self) -> str | None:
        """Returns a description of how the server ended; None while its processes run and, after startup, accept
        connections.

        Connections are checked because a server that has lost its scheduler refuses them before its process tree has
        ended, and a client that has just lost a request must not consider this server healthy."""
        spec = self.spec
        deadline = time.monotonic() + ENDING_S
        while self.process is None or (end := self.process.ended()) is None:
            if not self._listens or await _takes_connections(spec.host, spec.port):
                return None if self.nodes is None else await self.nodes.ended(ANSWER_S)
            if time.monotonic() > deadline:
                condition = "an external server," if spec.external else "whose process still runs,"
                return f"engine {spec.name}, {condition} refuses connections at {spec.url}: see its log {self.log_path}"
            await asyncio.sleep(0.1)
        return end

    async def while_running[T](self, work: Awaitable[T]) -> T:
        """Awaits `work` and returns its result. Raises ReceiverLost if the server is stopped first, because no request
        of this work may reach the server after a restart."""
        task = asyncio.ensure_future(work)
        self.pending.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self.pending.discard(task)
            await cancelled(task)
        if task.cancelled():
            raise ReceiverLost(
                f"engine {self.spec.name} was stopped before it responded; wait until slimx has restarted the engine",
                code="engine.stopped",
                about=self.spec.name,
            )
        return task.result()

    async def call(self, path: str, body: Json | None = None) -> Json:
        """Returns the JSON response of SGLang's endpoint `path`. Raises ReceiverLost if the server has ended or does
        not respond, and SlimxError if it responds with an error."""
        return await self._answer(self.wire.call(path, body))

    async def request_ranks(self, verb: str, **arguments: object) -> list[Json]:
        """Sends the request `verb` to the slimx plugin and returns the responses of all ranks. Raises the same errors
        as `call`."""
        return await self._answer(self.wire.request_ranks(verb, deadline_s=None, **arguments))

    async def _answer[T](self, call: Awaitable[T]) -> T:
        try:
            return await call
        except SlimxError as error:
            problem = error
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.wire.request_ranks("status")
        except (SlimxError, TimeoutError):
            # A server that has lost its scheduler drops connections for up to a second before its process ends.
            until = time.monotonic() + ENDING_S
            while (end := await self.ended()) is None and time.monotonic() < until:
                await asyncio.sleep(0.1)
            if end is not None:
                problem = ReceiverLost(end, code="engine.ended")
            raise ReceiverLost(str(problem), code=problem.code, about=self.spec.name) from None
        raise SlimxError(str(problem), code=problem.code, about=problem.about)

    def mark(self, text: str) -> None:
        """Writes a separator line with `text` into the server's log."""
        with self.log_path.open("a") as log:
            print(marked(f"engine {self.spec.name}, {text}"), file=log)

    async def end_processes(self, grace_s: float) -> None:
        """Ends the server's process trees on all its nodes; kills those that have not ended after `grace_s` seconds."""
        if self.spec.device == "cpu":
            # It is killed, because SGLang notices a stop only every 5 s and has nothing to release except memory.
            grace_s = 0.0
        stopping = []
        if self.process is not None:
            stopping.append(asyncio.to_thread(self.process.stop, grace_s))
        if self.nodes is not None:
            stopping.append(self.nodes.stop(grace_s, grace_s + STOP_S / 2))
        await asyncio.gather(*stopping)

    async def release(self, *, paused: bool) -> None:
        """Prepares an external server for its next user by aborting the publication that has begun there. Called when a
        run starts and when it stops using the server; a server that does not respond is ignored. `paused`: True to
        resume generation as well, which is allowed only if the server's weights are complete."""
        if not self.spec.external or self.spec.frozen:
            return
        with contextlib.suppress(SlimxError):
            await self.wire.request_ranks("abort", deadline_s=LEAVE_S)
        if paused:
            with contextlib.suppress(SlimxError):
                await self.wire.call("/continue_generation", {}, deadline_s=LEAVE_S)


async def _takes_connections(host: str, port: int) -> bool:
    """Returns False if the server refuses a connection, and True otherwise, because even a slow or suspended server
    accepts one."""
    try:
        async with asyncio.timeout(1):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return True
    writer.close()
    return True
