"""The server of an engine: its processes, whether they live, and calls to it. Its state is the engine's."""

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
from slimx.data.whole import Json
from slimx.engines.server.attestation import attested
from slimx.engines.server.spec import EngineSpec, NodeShare, server_argv, server_env
from slimx.engines.server.wire import Wire
from slimx.engines.transport import End
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.parties import ReceiverLost
from slimx.runtime.logs import marked
from slimx.runtime.ports import LOOPBACK, claimed_port, local_address
from slimx.runtime.process import SupervisedProcess
from slimx.runtime.tasks import cancelled, first_of

ANSWER_S = 5.0
"""Seconds in which a server that is alive says so."""
ENDING_S = 3.0
"""Seconds from a server's first refusal of a connection in which its process should be gone."""
LEAVE_S = 5.0
"""Seconds for each of the calls by which somebody else's server is taken over or left."""
LOOK_S = 2.0
"""Seconds between two looks at a server's other machines while it starts."""
STOP_S = 30.0
"""Seconds in which a server's tree must be gone."""
PORT = "engine.port"
"""Code of the error where a server's HTTP port was taken between its choice and its use."""
PORTS = 3
"""Ports that a start tries when other programs take them."""
PORT_TAKEN = "error while attempting to bind on address"
"""Words of uvicorn in the server's log."""


MACHINES = "slimx.machines"
"""Entry points: classes of `Machines`."""


class Machines(Protocol):
    """The machines of a server that spans several, but for the first, in whose process this is."""

    count: int

    async def start(self, host: str, deadline_s: float) -> NodeShare:
        """Start their processes; return the share of the first machine, at `host`."""
        ...

    async def ended(self, deadline_s: float) -> str | None:
        """Return the end of the first of them that ended, in words; None while they run, or do not answer."""
        ...

    async def transport(self, method: str, messages: Sequence[Any] | None = None) -> list[Any]:
        """Call `method` of the transport's end on each of them, with one of `messages`; return the answers."""
        ...

    async def stop(self, grace_s: float, deadline_s: float) -> None:
        """End their processes. Does not raise."""
        ...


class Server:
    """A server through all its starts, in a process on its own (first) machine, so that it can start, watch and end it.
    One that somebody else started is asked, used, and left as it was."""

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
        """`spec`: without what differs between starts. `deadline_s`: seconds for one call to the server. `network`: in
        which it takes its address (`slimx.runtime.ports.local_address`). `places`: of a server on several machines, all
        but the first. `make_end`: of a transport that has an end on each machine."""
        self.planned, self.log_path, self.deadline_s = spec, log_path, deadline_s
        self.network, self.host, self.places = network, local_address(network), places
        self.make_end = make_end
        self.end = None if make_end is None else make_end()
        self._claims: list[socket.socket] = []
        """Claims on the ports of the last start; those of the one before are given back."""
        self.under_way: set[asyncio.Future[Any]] = set()
        """Work that ends with this start."""
        self.reset(spec)

    def reset(self, spec: EngineSpec) -> None:
        """Begin a start by `spec`, of which nothing is known yet."""
        self.spec = spec
        self.wire = Wire(spec.url, f"engine {spec.name}", spec.keys, self.deadline_s)
        self.process: SupervisedProcess | None = None
        """None for somebody else's."""
        self.nodes: Machines | None = None
        """The other machines of a server on several."""
        self.attestation: list[Json] = []
        self._listens = False
        """True once it has answered."""

    async def launch(self, deadline_s: float) -> None:
        """Start a server and wait until it attests the plugin.

        Each start takes a port of its own: what was sent to an earlier server cannot reach the new one. Another program
        may take that port while the server imports its modules: up to `PORTS` are tried.
        """
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
            name, keys = f"engine {self.spec.name}", self.spec.keys.to_bytes()
            argv, environment = server_argv(self.spec), server_env(self.spec)
            self.process = SupervisedProcess(name, argv, self.log_path, environment, keys)
            self.process.start()
        if self.end is not None:
            await self.end.prepare(self.host, self.nodes)
        await self.wait_ready(deadline_s)

    def _placed(self) -> EngineSpec:
        """The specification of the next start, with ports of its own."""
        if self.planned.external:
            return self.planned
        prefill = self.planned.role == "prefill"
        before, claimed = self._claims, [claimed_port(self.host) for _ in range(1 + prefill)]
        self._claims = [claim for _, claim in claimed]
        for claim in before:
            claim.close()
        (port, *others) = (port for port, _ in claimed)
        return replace(self.planned, port=port, host=self.host, bootstrap_port=others[0] if prefill else None)

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until the server generates and attests the plugin. Raises SlimxError if one of its processes ends.

        A frozen model of somebody else's server need not attest anything: nothing is published to it.
        """
        await self.release(paused=True)
        waits = [self._wait_until_it_generates(deadline_s)]
        if self.nodes is not None:
            waits.append(self._wait_for_a_lost_share())
        await first_of(waits)
        self._listens = True
        if not (self.spec.external and self.spec.frozen):
            self.attestation = await attested(self.wire, self.spec, self.process)
        if not self.spec.external:
            # Collections leave out what the start has made: on a CPU each flush of the cache is a full one.
            await self.wire.call("/freeze_gc")

    async def _wait_until_it_generates(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not await self._generates():
                    await asyncio.sleep(0.25)
        except TimeoutError:
            what = f"engine {self.spec.name} at {self.spec.url} to become ready"
            raise DeadlineError(what, deadline_s, f"log {self.log_path}") from None

    async def _generates(self) -> bool:
        """Look once. A server that has died is reported with the last lines of its log."""
        if self.process is not None and (end := self.process.ended()) is not None:
            raise SlimxError(f"before it was ready {end}", code="engine.died", about=self.spec.name)
        if self.process is not None and PORT_TAKEN in self.process.tail():
            # SGLang's process stays when its HTTP server could not start.
            raise SlimxError(
                f"engine {self.spec.name} cannot listen at {self.spec.url}: the port is taken; end what listens there",
                code=PORT,
                about=self.spec.url,
            )
        try:
            await self.check_generation(30.0)
        except SlimxError:
            return False
        return True

    async def check_generation(self, deadline_s: float) -> None:
        """Raise SlimxError unless it generates (SGLang needs 1 s to tell). A paused one never answers."""
        await self.wire.call("/health_generate", method="GET", deadline_s=deadline_s)

    async def _wait_for_a_lost_share(self) -> None:
        while (end := await self.nodes.ended(ANSWER_S)) is None:
            await asyncio.sleep(LOOK_S)
        raise SlimxError(end)

    async def ended(self) -> str | None:
        """The end of the server in words; None while its processes run and, once it has listened, it takes connections.

        A server that has lost its scheduler refuses connections some time before its tree is gone: a client that has
        lost a request then must not read that all is well.
        """
        spec, deadline = self.spec, time.monotonic() + ENDING_S
        while self.process is None or (end := self.process.ended()) is None:
            if not self._listens or await _takes_connections(spec.host, spec.port):
                return None if self.nodes is None else await self.nodes.ended(ANSWER_S)
            if time.monotonic() > deadline:
                what = "which somebody else started," if spec.external else "although it runs,"
                return f"engine {spec.name}, {what} refuses connections at {spec.url}; log {self.log_path}"
            await asyncio.sleep(0.1)
        return end

    async def lasting[T](self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises ReceiverLost if this start of the server ends before: nothing of it may reach
        the next one."""
        task = asyncio.ensure_future(work)
        self.under_way.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self.under_way.discard(task)
            await cancelled(task)
        if task.cancelled():
            raise ReceiverLost(f"engine {self.spec.name} was stopped", code="engine.stopped", about=self.spec.name)
        return task.result()

    async def call(self, path: str, body: Json | None = None) -> Json:
        """The answer of an endpoint of SGLang. Raises ReceiverLost if the server is gone or silent, SlimxError if it
        refuses."""
        return await self._answer(self.wire.call(path, body))

    async def ask(self, verb: str, **arguments: Any) -> list[Json]:
        """The answers of all ranks to a verb of the plugin; raises as `call` does."""
        return await self._answer(self.wire.ask(verb, **arguments))

    async def _answer[T](self, call: Awaitable[T]) -> T:
        try:
            return await call
        except SlimxError as error:
            problem = error
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.wire.ask("status")
        except (SlimxError, TimeoutError):
            # One that has lost its scheduler breaks connections for a second before it ends.
            until = time.monotonic() + ENDING_S
            while (end := await self.ended()) is None and time.monotonic() < until:
                await asyncio.sleep(0.1)
            if end is not None:
                problem = ReceiverLost(end, code="engine.ended")
            raise ReceiverLost(str(problem), code=problem.code, about=self.spec.name) from None
        raise SlimxError(str(problem), code=problem.code, about=problem.about)

    def mark(self, text: str) -> None:
        """Write into the server's log what the lines that follow belong to."""
        with self.log_path.open("a") as log:
            print(marked(f"engine {self.spec.name}, {text}"), file=log)

    async def end_processes(self, grace_s: float) -> None:
        """End the server with its whole process tree, on all its machines."""
        if self.spec.device == "cpu":
            # SGLang looks only every 5 s whether it shall end, and has nothing to give back but memory.
            grace_s = 0.0
        stopping = []
        if self.process is not None:
            stopping.append(asyncio.to_thread(self.process.stop, grace_s))
        if self.nodes is not None:
            stopping.append(self.nodes.stop(grace_s, grace_s + STOP_S / 2))
        await asyncio.gather(*stopping)

    async def release(self, *, paused: bool) -> None:
        """End the publication that is open at somebody else's server and, if it is `paused` with whole weights, have it
        generate: what an earlier run left is ended before it is used, and what is ours when it is left. It need not
        answer."""
        if not self.spec.external or self.spec.frozen:
            return
        with contextlib.suppress(SlimxError):
            await self.wire.ask("abort", deadline_s=LEAVE_S)
        if paused:
            with contextlib.suppress(SlimxError):
                await self.wire.call("/continue_generation", {}, deadline_s=LEAVE_S)


async def _takes_connections(host: str, port: int) -> bool:
    """False only if a connection is refused: a server that is slow, or stopped, still takes one."""
    try:
        async with asyncio.timeout(1):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return True
    writer.close()
    return True
