"""A server that spans several machines: what each machine's actor does, and what the first one knows of the others.

The first machine's actor (`slimx.engines.server.engine.Engine`) owns the others': they end with it, and the
guards of their processes end these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from slimx.cluster.place import Placement
from slimx.cluster.waiting import gather
from slimx.engines.server.spec import EngineSpec, NodeShare, server_argv, server_env
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.packed import PackedBucket
from slimx.runtime.ports import address, free_port, own_address
from slimx.runtime.process import SupervisedProcess


class DirectEnd:
    """This machine's end of direct transfers, in which trainer ranks write into its memory, or that of its GPUs."""

    def __init__(self) -> None:
        self._receivers: list[Any] = []

    async def prepare(self) -> None:
        """Import torch and NIXL, which nothing else needs here."""
        await asyncio.to_thread(import_module, "slimx.reshard.direct.receiver")

    async def join(self, invitations: Sequence[Any], host: str) -> list[Any]:
        """Offer memory at `host` to the trainer ranks, as each `Invitation` of slimx.reshard.direct.receiver asks; what
        was offered before is withdrawn."""
        from slimx.reshard.direct.receiver import Receiver

        while self._receivers:
            await asyncio.to_thread(self._receivers.pop().close)
        for invitation in invitations:
            self._receivers.append(await asyncio.to_thread(Receiver.invited, invitation, host))
        return [receiver.offer() for receiver in self._receivers]

    async def bases(self) -> list[list[int]]:
        """By receiver and bucket the transfer whose bytes are held, to which changes can be applied."""
        return [receiver.bases() for receiver in self._receivers]

    @asynccontextmanager
    async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """A bucket once it has come, in memory that the server opens, for the time of the block. Whoever is cancelled
        while it comes closes the receivers, and leaves when their threads have ended."""
        from slimx.reshard.direct.copies import shares_of, together

        shares = zip(self._receivers, shares_of(packed, len(self._receivers)), strict=True)
        arriving = [receiver.landed(share) for receiver, share in shares]
        entering = [asyncio.ensure_future(asyncio.to_thread(one.__enter__)) for one in arriving]
        try:
            await asyncio.wait(entering)
            yield together(packed, [entered.result() for entered in entering])
        finally:
            if not all(entered.done() for entered in entering):
                for receiver in self._receivers:
                    await asyncio.to_thread(receiver.close)
                await asyncio.wait(entering)
            for one, entered in zip(arriving, entering, strict=True):
                if entered.exception() is None:
                    one.__exit__(None, None, None)


class FilesEnd:
    """This machine's end of a directory to which changes are written (`publish.delta` with `disk`)."""

    def __init__(self, item: int) -> None:
        """`item`: bytes of an element."""
        self.item = item
        self._reader: Any = None

    async def prepare(self) -> None:
        """Import torch, which nothing else needs here."""
        module = await asyncio.to_thread(import_module, "slimx.reshard.transports.disk_changes")
        self._reader = module.ChainReader(self.item)

    @asynccontextmanager
    async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """The whole bucket, made of its files, in memory that the server opens, for the time of the block."""
        arriving = self._reader.landed(packed)
        landed = await asyncio.to_thread(arriving.__enter__)
        try:
            yield landed
        finally:
            arriving.__exit__(None, None, None)


class NodeActor:
    """The process that owns a server's share on a machine other than its first."""

    def __init__(self, spec: EngineSpec, log_path: Path, network: str | None, direct: bool):
        """`spec`: without what differs between starts. `network`: in which it takes its address. `direct`: whether
        buckets come from every trainer rank."""
        self.spec, self.log_path, self.host = spec, log_path, own_address(network)
        self.end = DirectEnd() if direct else None
        self.process: SupervisedProcess | None = None
        self._held = AsyncExitStack()

    async def address(self) -> str:
        """The address at which this machine's share listens, and from which it connects."""
        return self.host

    async def start(self, share: NodeShare) -> None:
        spec = replace(self.spec, port=free_port(self.host), host=self.host, node=share)
        name = f"engine {spec.name}, machine {share.rank}"
        keys = spec.keys.to_bytes()
        self.process = SupervisedProcess(name, server_argv(spec), self.log_path, server_env(spec), keys)
        self.process.start()
        if self.end is not None:
            await self.end.prepare()

    async def ended(self) -> str | None:
        """The end of its process in words; None while it runs."""
        return None if self.process is None else self.process.ended()

    async def stop(self, grace_s: float) -> None:
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, grace_s)

    async def offer(self, invitations: Sequence[Any]) -> list[Any]:
        """Offer memory to the trainer ranks, for the server's ranks on this machine."""
        return await self.end.join(invitations, self.host)

    async def bases(self) -> list[list[int]]:
        """By receiver and bucket the transfer whose bytes are held."""
        return await self.end.bases()

    async def land(self, packed: PackedBucket) -> PackedBucket:
        """Take a bucket; the same as it lies in memory that the server opens, until `let_go`."""
        return await self._held.enter_async_context(self.end.landed(packed))

    async def let_go(self) -> None:
        await self._held.aclose()


class Nodes:
    """The machines of a server on several: what arrives at the first one, and the actors of the others, called
    together."""

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        network: str | None,
        places: Sequence[Placement],
        end: DirectEnd | FilesEnd | None,
        deadline_s: float,
    ):
        """`places`: of all machines but the first. `end`: of the first. `deadline_s`: seconds for taking bytes."""
        self.name, self.end, self.deadline_s = spec.name, end, deadline_s
        direct = isinstance(end, DirectEnd)
        cpus = spec.threads * spec.sizes.world / (len(places) + 1)
        self._logs = [
            log_path.with_name(f"{log_path.stem}.node{n}{log_path.suffix}") for n in range(1, len(places) + 1)
        ]
        self._actors = [
            ray.remote(NodeActor)
            .options(**place.options(cpus))
            .remote(replace(spec, gpus=place.gpus), log, network, direct)
            for place, log in zip(places, self._logs, strict=True)
        ]

    @property
    def count(self) -> int:
        return len(self._actors)

    async def start(self, host: str, deadline_s: float) -> NodeShare:
        """Start their processes; the share of the first machine, at `host`."""
        hosts = (host, *await self._call("address", deadline_s))
        meeting = address(host, free_port(host))
        first, *shares = [NodeShare(rank, len(hosts), meeting, hosts) for rank in range(len(hosts))]
        await self._call("start", deadline_s, [(share,) for share in shares])
        return first

    async def ended(self, deadline_s: float) -> str | None:
        """The end of the first of them that ended, in words; None while they run, or do not say."""
        try:
            answers = await self._call("ended", deadline_s)
        except DeadlineError:
            return None
        except SlimxError as error:
            return str(error)
        return next((answer for answer in answers if answer is not None), None)

    async def join(self, invitations: Sequence[Any], host: str) -> list[Any]:
        """The offers of memory to trainer ranks: as many from each machine, the first one's at `host`."""
        share = len(invitations) // (1 + self.count)
        first, *rest = (invitations[at : at + share] for at in range(0, len(invitations), share))
        offered = self._call("offer", self.deadline_s, [(part,) for part in rest])
        own, others = await asyncio.gather(self.end.join(first, host), offered)
        return [*own, *chain.from_iterable(others)]

    async def bases(self) -> list[list[int]]:
        """By receiver and bucket the transfer whose bytes are held, on all machines."""
        others = await self._call("bases", self.deadline_s)
        return [*await self.end.bases(), *chain.from_iterable(others)]

    @asynccontextmanager
    async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """A bucket of direct transfers, of which each machine has what its ranks take."""
        from slimx.reshard.direct.copies import shares_of, together

        first, *rest = shares_of(packed, self.count + 1)
        landing = asyncio.ensure_future(self._call("land", self.deadline_s, [(part,) for part in rest]))
        try:
            async with self.end.landed(first) as landed:
                yield together(packed, [landed, *await landing])
        finally:
            landing.cancel()
            await self._call("let_go", self.deadline_s)

    async def stop(self, grace_s: float, deadline_s: float) -> None:
        """End their processes, and the actors: another start makes others. Does not raise."""
        actors, self._actors = self._actors, []
        stopping = [asyncio.ensure_future(_answer(actor.stop.remote(grace_s))) for actor in actors]
        if stopping:
            await asyncio.wait(stopping, timeout=deadline_s)
        for task, actor in zip(stopping, actors, strict=True):
            task.cancel()
            ray.kill(actor)
        await asyncio.gather(*stopping, return_exceptions=True)

    async def _call(
        self, method: str, deadline_s: float, arguments: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """The answers of all actors to `method`, of each with its arguments. Raises SlimxError, as one raised it."""
        if arguments is None:
            arguments = [()] * self.count
        return await gather(
            [getattr(actor, method).remote(*values) for actor, values in zip(self._actors, arguments, strict=True)],
            what=method,
            holders=[f"machine {number} of engine {self.name}" for number in range(1, self.count + 1)],
            deadline_s=deadline_s,
            logs=self._logs,
        )


async def _answer(reference: Any) -> Any:
    return await reference
