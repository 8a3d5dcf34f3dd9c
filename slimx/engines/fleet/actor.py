"""The Ray actor that owns one engine's server; others call it through `slimx.engines.fleet.handle`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from slimx.cluster.place import Placement
from slimx.engines.fleet.nodes import DirectEnd, FilesEnd, OtherNodes
from slimx.engines.server.control import PortTaken
from slimx.engines.server.engine import Engine, State
from slimx.engines.server.spec import EngineSpec, NodeShare
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import BEFORE_BEGIN, ReceiverLost
from slimx.runtime.logs import how_ended, marked, quoted
from slimx.runtime.ports import LOOPBACK, claimed_port, own_address

ANSWER_S = 5.0
"""Seconds in which a server that is alive says so."""
ENDING_S = 3.0
"""Seconds from a server's first refusal of a connection in which its process should be gone."""
LOOK_S = 2.0
"""Seconds between two looks at a server's other machines while it starts."""
PORTS = 3
"""Ports that a start tries when other programs take them."""
STOP_S = 30.0
"""Seconds in which a server's tree must be gone."""

BESIDE = ("join", "bases", "receive")
"""Verbs of a publication that the actor does itself: the server finds buckets in memory, or in files."""


class EngineActor:
    """The process that owns one server: on the server's own (first) machine, so that it can start, watch and end it."""

    def __init__(
        self,
        values: dict[str, Any],
        log_path: str,
        call_deadline_s: float,
        network: str | None = LOOPBACK,
        others: tuple[Placement, ...] = (),
        url: str | None = None,
        direct: bool = False,
        item: int | None = None,
    ):
        """`values`: an EngineSpec without what differs between starts. `call_deadline_s`: seconds for one call to the
        server. `network`: in which it takes its address (`slimx.runtime.ports.own_address`). `others`: of a server on
        several machines, all but the first. `url`: of a server that runs already and is not ours.
        `direct`: whether every trainer rank writes to memory beside it. `item`: bytes of an element where buckets come
        as files of changes."""
        self.values, self.log_path, self.call_deadline_s = values, log_path, call_deadline_s
        self.network, self.host, self.places, self.url = network, own_address(network), others, url
        self._claims: list[socket.socket] = []
        """Claims on the ports of the present server; those of the one before are given back."""
        self.engine = Engine(self._spec(), log_path)
        self.epoch = -1
        """Membership epoch of the publication that was begun last."""
        self.end = DirectEnd() if direct else None if item is None else FilesEnd(item)
        """The end at which buckets arrive; None: the server opens them where they are."""
        self.others: OtherNodes | None = None
        """The other machines of this start's server."""

    def _spec(self, node: NodeShare | None = None) -> EngineSpec:
        """The specification of the next server."""
        if self.url is not None:
            where = urlsplit(self.url)
            return EngineSpec(port=where.port, host=where.hostname, external=True, **self.values)
        prefill = self.values.get("role") == "prefill"
        before, claimed = self._claims, [claimed_port(self.host) for _ in range(1 + prefill)]
        self._claims = [claim for _, claim in claimed]
        for claim in before:
            claim.close()
        (port, *others) = (port for port, _ in claimed)
        bootstrap = others[0] if prefill else None
        return EngineSpec(port=port, host=self.host, bootstrap_port=bootstrap, node=node, **self.values)

    def mark(self, text: str) -> None:
        """Write into the server's log what the lines that follow belong to."""
        with open(self.log_path, "a") as log:
            print(marked(f"engine {self.values['name']}, {text}"), file=log)

    async def start(self, deadline_s: float) -> dict[str, Any]:
        """Start a server and wait until it attests the plugin; its URL and attestation.

        Each start takes a port of its own: what was sent to an earlier server cannot reach the new one. Another program
        may take that port while the server imports its modules: up to `PORTS` are tried.
        """
        for left in reversed(range(PORTS)):
            try:
                await self._start(deadline_s)
                break
            except PortTaken:
                if not left:
                    raise
                await self.stop(ENDING_S)
        spec = self.engine.spec
        return {"url": spec.url, "bootstrap_port": spec.bootstrap_port, "attestation": self.engine.attestation}

    async def _start(self, deadline_s: float) -> None:
        """Start a server once."""
        node = None
        if self.places:
            spec = self.engine.spec
            cpus = spec.threads * spec.sizes.world / (len(self.places) + 1)
            direct = isinstance(self.end, DirectEnd)
            self.others = OtherNodes(self.values, self.log_path, self.network, self.places, cpus, direct=direct)
            node = await self.others.start(self.host, deadline_s)
        self.engine = Engine(self._spec(node), self.log_path)
        self.engine.control.deadline_s = self.call_deadline_s
        self.engine.start()
        if self.end is not None:
            await self.end.prepare()
        await self._ready(deadline_s)

    async def _ready(self, deadline_s: float) -> None:
        """Wait until the server is ready, or a machine has lost its share."""
        ready = asyncio.ensure_future(self.engine.wait_ready(deadline_s))
        try:
            while not (await asyncio.wait({ready}, timeout=LOOK_S))[0]:
                if self.others is not None and (end := await self.others.ended(ANSWER_S)) is not None:
                    raise SlimxError(end, code="engine.share_ended", about=self.engine.spec.name)
            await ready
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def perform(self, verb: str, epoch: int | None, deadline_s: float, *arguments: Any) -> Any:
        """Do a verb of `slimx.reshard.parties.Receiver`, as a step of the publication of membership `epoch`, or, with
        epoch None, any method of Engine. Whatever belongs to an older publication than the newest is refused."""
        if epoch is not None:
            self._enter(verb, epoch)
        work = getattr(self, verb) if verb in BESIDE else partial(self._ask_engine, verb)
        try:
            async with asyncio.timeout(deadline_s):
                return await work(*arguments)
        except TimeoutError:
            raise DeadlineError(verb, deadline_s, f"engine {self.engine.spec.name}") from None

    def _enter(self, verb: str, epoch: int) -> None:
        if epoch < self.epoch or (epoch > self.epoch and verb not in BEFORE_BEGIN):
            raise SlimxError(
                f"engine {self.engine.spec.name}: {verb} of epoch {epoch} is late; a publication of epoch {self.epoch} "
                "has begun",
                code="engine.late",
                about=verb,
            )
        if verb == "begin":
            self.epoch = epoch

    async def join(self, invitations: Sequence[Any]) -> list[Any]:
        """Offer memory to the trainer ranks, as each `Invitation` of slimx.reshard.direct.receiver asks, of which every
        machine takes as many; the offers."""
        each = len(invitations) // (1 + len(self.places))
        own, *rest = (invitations[at : at + each] for at in range(0, len(invitations), each))
        others = self.others.offer(rest, self.call_deadline_s) if self.others is not None else _none()
        first, offers = await asyncio.gather(self.end.join(own, self.host), others)
        return [*first, *offers]

    async def bases(self) -> list[list[int]]:
        """By receiver and bucket the transfer whose bytes are held there (`slimx.reshard.direct.receiver`)."""
        others = self.others.bases(self.call_deadline_s) if self.others is not None else _none()
        return [*self.end.bases(), *await others]

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Take a bucket into memory that the server opens, and have it staged."""
        if self.others is None:
            arriving = self.end.landed(packed)
        else:
            arriving = self.others.landed(self.end, packed, self.call_deadline_s)
        async with arriving as landed:
            await self._ask_engine("stage", landed, bucket)

    async def _ask_engine(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self.engine, method)(*arguments)
        except SlimxError as error:
            raise await self._told(error) from None

    async def state(self) -> str:
        return str(self.engine.state)

    async def ended(self) -> str | None:
        """The end of the server in words; None while its process runs and takes connections.

        A server that has lost its scheduler refuses connections some time before its tree is gone: whoever lost a
        request then must not be told that all is well.
        """
        spec, process = self.engine.spec, self.engine.process
        deadline = time.monotonic() + ENDING_S
        while (status := process.poll()) is None:
            if self.engine.state is State.STARTING or await _takes_connections(spec.host, spec.port):
                return await self._ended_elsewhere()
            if time.monotonic() > deadline:
                what = "which somebody else started," if spec.external else "although it runs,"
                return f"engine {spec.name}, {what} refuses connections at {spec.url}; log {process.log_path}"
            await asyncio.sleep(0.1)
        return f"engine {spec.name} {how_ended(status)}; {quoted(process.log_path, process.tail())}"

    async def _ended_elsewhere(self) -> str | None:
        """The end of another machine's share of the server, in words."""
        if self.others is None:
            return None
        try:
            return await self.others.ended(ANSWER_S)
        except DeadlineError:
            return None
        except SlimxError as error:
            return str(error)

    async def stop(self, grace_s: float) -> None:
        stopping = [self.engine.stop(grace_s)]
        if self.others is not None:
            stopping.append(self.others.stop(grace_s, grace_s + STOP_S / 2))
        await asyncio.gather(*stopping)
        self.others = None

    async def _told(self, error: SlimxError) -> SlimxError:
        """`error` as ReceiverLost if the server is gone or silent, as a refusal if it still answers."""
        if (end := await self.ended()) is not None:
            return ReceiverLost(end, code="engine.ended", about=self.engine.spec.name)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.engine.control.status()
        except (SlimxError, TimeoutError):
            return ReceiverLost(str(error), code=error.code, about=self.engine.spec.name)
        return SlimxError(str(error), code=error.code, about=error.about)


async def _none() -> list[Any]:
    return []


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
