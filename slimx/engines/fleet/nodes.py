"""A server that spans several machines: what each machine's actor does, and what the first one knows of the others.

The first machine's actor (`slimx.engines.fleet.actor.EngineActor`) owns the others': they end with it, and the
guards of their processes end these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from slimx.cluster.place import Placement
from slimx.engines.server.spec import EngineSpec, NodeShare, ending_grace, server_argv, server_env
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.packed import PackedBucket
from slimx.runtime.logs import how_ended, quoted
from slimx.runtime.ports import address, free_port, own_address
from slimx.runtime.process import SupervisedProcess


def share_of(ranks: Sequence[Placement], name: str) -> Placement:
    """The place of a server's share that takes turns with trainer `ranks`, one GPU each. Raises SlimxError if they are
    not on one machine."""
    nodes = {place.node for place in ranks}
    if len(nodes) > 1:
        raise SlimxError(
            f"{len(ranks)} consecutive trainer ranks, whose GPUs a server of rollout.engines group {name} shares, are "
            f"on {len(nodes)} machines; make the ranks of a machine's share (tensor x pipeline / nodes) divide its "
            "GPUs",
            code="engines.shared_gpus",
            about=name,
        )
    return Placement(nodes.pop(), tuple(gpu for place in ranks for gpu in place.gpus or ()))


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

    def bases(self) -> list[list[int]]:
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

    def __init__(self, values: dict[str, Any], log_path: str, network: str | None, direct: bool):
        """`values`: an EngineSpec without what differs between starts. `network`: in which it takes its address.
        `direct`: whether buckets come from every trainer rank."""
        self.values, self.log_path, self.host = values, log_path, own_address(network)
        self.end = DirectEnd() if direct else None
        self.process: SupervisedProcess | None = None
        self._held = AsyncExitStack()

    async def address(self) -> str:
        """The address at which this machine's share listens, and from which it connects."""
        return self.host

    async def start(self, share: NodeShare) -> None:
        spec = EngineSpec(port=free_port(self.host), host=self.host, node=share, **self.values)
        name = f"engine {spec.name}, machine {share.rank}"
        keys = spec.keys.to_bytes()
        self.process = SupervisedProcess(name, server_argv(spec), self.log_path, server_env(spec), keys)
        self.process.start()
        if self.end is not None:
            await self.end.prepare()

    async def ended(self) -> str | None:
        """The end of its process in words; None while it runs."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        return f"{self.process.name} {how_ended(status)}; {quoted(self.process.log_path, self.process.tail())}"

    async def stop(self, grace_s: float) -> None:
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, ending_grace(self.values["device"], grace_s))

    async def offer(self, invitations: Sequence[Any]) -> list[Any]:
        """Offer memory to the trainer ranks, for the server's ranks on this machine."""
        return await self.end.join(invitations, self.host)

    async def bases(self) -> list[list[int]]:
        """By receiver and bucket the transfer whose bytes are held."""
        return self.end.bases()

    async def land(self, packed: PackedBucket) -> PackedBucket:
        """Take a bucket; the same as it lies in memory that the server opens, until `let_go`."""
        return await self._held.enter_async_context(self.end.landed(packed))

    async def let_go(self) -> None:
        await self._held.aclose()


class OtherNodes:
    """The actors of a server's machines other than the first, called together."""

    def __init__(
        self,
        values: dict[str, Any],
        log_path: str,
        network: str | None,
        places: Sequence[Placement],
        cpus: float,
        *,
        direct: bool,
    ):
        self.name = values["name"]
        self._actors = [
            ray.remote(NodeActor)
            .options(**place.options(cpus))
            .remote(values | {"gpus": place.gpus}, str(node_log(log_path, number)), network, direct)
            for number, place in enumerate(places, 1)
        ]

    @property
    def count(self) -> int:
        return len(self._actors)

    async def start(self, host: str, deadline_s: float) -> NodeShare | None:
        """Start their processes; the first machine's share, None where it is the only one."""
        if not self._actors:
            return None
        others = await self._call("address", [()] * self.count, deadline_s)
        shares = shares_of((host, *others), address(host, free_port(host)))
        await self._call("start", [(share,) for share in shares[1:]], deadline_s)
        return shares[0]

    async def ended(self, deadline_s: float) -> str | None:
        """The end of the first of them that ended, in words."""
        answers = await self._call("ended", [()] * self.count, deadline_s)
        return next((answer for answer in answers if answer is not None), None)

    async def offer(self, invitations: Sequence[Sequence[Any]], deadline_s: float) -> list[Any]:
        """The offers of memory that they make to `invitations`, those of each machine."""
        return list(chain.from_iterable(await self._call("offer", [(own,) for own in invitations], deadline_s)))

    async def bases(self, deadline_s: float) -> list[list[int]]:
        return list(chain.from_iterable(await self._call("bases", [()] * self.count, deadline_s)))

    @asynccontextmanager
    async def landed(self, end: DirectEnd, packed: PackedBucket, deadline_s: float) -> AsyncIterator[PackedBucket]:
        """A bucket of direct transfers, of which each machine, the first (`end`) included, has what its ranks take."""
        from slimx.reshard.direct.copies import shares_of, together

        first, *rest = shares_of(packed, self.count + 1)
        landing = asyncio.ensure_future(self._call("land", [(part,) for part in rest], deadline_s))
        try:
            async with end.landed(first) as landed:
                yield together(packed, [landed, *await landing])
        finally:
            landing.cancel()
            await self._call("let_go", [()] * self.count, deadline_s)

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

    async def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], deadline_s: float) -> list[Any]:
        calls = [
            _answer(getattr(actor, method).remote(*given)) for actor, given in zip(self._actors, arguments, strict=True)
        ]
        what = f"{method} on {self.count} other machines of engine {self.name}"
        try:
            async with asyncio.timeout(deadline_s):
                return list(await asyncio.gather(*calls))
        except TimeoutError:
            raise DeadlineError(what, deadline_s, f"engine {self.name}") from None
        except ray.exceptions.RayError as error:
            raise SlimxError(
                f"{what} failed: {' '.join(str(error).split())[:300]}", code="engine.nodes", about=self.name
            ) from None


def shares_of(hosts: tuple[str, ...], meeting: str) -> list[NodeShare]:
    """The share of each of `hosts`, the addresses of a server's machines."""
    return [NodeShare(rank, len(hosts), meeting, hosts) for rank in range(len(hosts))]


def node_log(log_path: str | Path, number: int) -> Path:
    """The log of a server's share on its machine `number`; the first writes the server's own."""
    path = Path(log_path)
    return path if number == 0 else path.with_name(f"{path.stem}.node{number}{path.suffix}")


async def _answer(reference: Any) -> Any:
    return await reference
