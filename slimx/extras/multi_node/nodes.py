"""A server that spans several machines: what each machine's actor does, and what the first one knows of the others.

The first machine's actor (`slimx.engines.server.engine.Engine`) owns the others': they end with it, and the
guards of their processes end these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slimx.cluster.place import Placement
from slimx.cluster.waiting import gather
from slimx.engines.server.spec import EngineSpec, NodeShare, server_argv, server_env
from slimx.engines.transport import End
from slimx.errors import DeadlineError, SlimxError
from slimx.runtime.ports import address, free_port, local_address
from slimx.runtime.process import SupervisedProcess


class NodeActor:
    """The process that owns a server's share on a machine other than its first."""

    def __init__(self, spec: EngineSpec, log_path: Path, network: str | None, make_end: Callable[[], End] | None):
        """`spec`: without what differs between starts. `network`: in which it takes its address. `make_end`: of a
        transport that has an end on each machine."""
        self.spec, self.log_path, self.host = spec, log_path, local_address(network)
        self.end = None if make_end is None else make_end()
        self.process: SupervisedProcess | None = None

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
            await self.end.prepare(self.host)

    async def ended(self) -> str | None:
        """The end of its process in words; None while it runs."""
        return None if self.process is None else self.process.ended()

    async def stop(self, grace_s: float) -> None:
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, grace_s)

    async def transport(self, method: str, *arguments: Any) -> Any:
        """Call a method of the transport's end here."""
        return await getattr(self.end, method)(*arguments)


class Nodes:
    """The machines of a server on several: the actors of all but the first, called together."""

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        network: str | None,
        places: Sequence[Placement],
        make_end: Callable[[], End] | None,
        deadline_s: float,
    ):
        """`places`: of all machines but the first. `deadline_s`: seconds for a call to a transport's ends."""
        self.name, self.deadline_s = spec.name, deadline_s
        cpus = spec.threads * spec.sizes.world / (len(places) + 1)
        self._logs = [
            log_path.with_name(f"{log_path.stem}.node{n}{log_path.suffix}") for n in range(1, len(places) + 1)
        ]
        self._actors = [
            ray.remote(NodeActor)
            .options(**place.options(cpus))
            .remote(replace(spec, gpus=place.gpus), log, network, make_end)
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

    async def transport(self, method: str, messages: Sequence[Any] | None = None) -> list[Any]:
        """Call `method` of the transport's end on every machine but the first, with one of `messages`; the answers."""
        arguments = [(method,)] * self.count if messages is None else [(method, message) for message in messages]
        return await self._call("transport", self.deadline_s, arguments)

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
