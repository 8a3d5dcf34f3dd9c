"""A server that spans several nodes: the actor of each node, and the group of actors owned by the first one.

The first node's actor (`slimx.engines.server.engine.Engine`) owns the others: they end with it, and the process guards
end their processes.
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
    """The actor that runs a server's processes on one of its nodes except the first."""

    def __init__(self, spec: EngineSpec, log_path: Path, network: str | None, make_end: Callable[[], End] | None):
        """Takes `spec`, without the values that differ between starts; `network`, which contains its address; and
        `make_end` of a transport with an end on each node."""
        self.spec = spec
        self.log_path = log_path
        self.host = local_address(network)
        self.end = None if make_end is None else make_end()
        self.process: SupervisedProcess | None = None

    async def address(self) -> str:
        """Returns the address on which this node's processes listen and from which they connect."""
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
        """Returns a sentence about the end of its process; None while it runs."""
        return None if self.process is None else self.process.ended()

    async def stop(self, grace_s: float) -> None:
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, grace_s)

    async def transport(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the transport's end on this node."""
        return await getattr(self.end, method)(*arguments)


class Nodes:
    """The actors of all nodes of a server except the first, called together."""

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        network: str | None,
        places: Sequence[Placement],
        make_end: Callable[[], End] | None,
        deadline_s: float,
    ):
        """Takes `places` of all nodes except the first, and `deadline_s` of a call to a transport's ends, in
        seconds."""
        self.name = spec.name
        self.deadline_s = deadline_s
        cpus = spec.threads * spec.sizes.world / (len(places) + 1)
        self._logs: list[Path] = []
        self._actors: list[Any] = []
        for rank, place in enumerate(places, 1):
            log = log_path.with_name(f"{log_path.stem}.node{rank}{log_path.suffix}")
            actor = ray.remote(NodeActor).options(**place.options(cpus))
            self._logs.append(log)
            self._actors.append(actor.remote(replace(spec, gpus=place.gpus), log, network, make_end))

    @property
    def count(self) -> int:
        return len(self._actors)

    async def start(self, host: str, deadline_s: float) -> NodeShare:
        """Starts the processes; returns the share of the first node, whose address is `host`."""
        hosts = (host, *await self._call("address", deadline_s))
        rendezvous = address(host, free_port(host))
        first, *shares = [NodeShare(rank, len(hosts), rendezvous, hosts) for rank in range(len(hosts))]
        await self._call("start", deadline_s, [(share,) for share in shares])
        return first

    async def ended(self, deadline_s: float) -> str | None:
        """Returns a sentence about the first process that ended; None while all run, or if one does not respond."""
        try:
            answers = await self._call("ended", deadline_s)
        except DeadlineError:
            return None
        except SlimxError as error:
            return str(error)
        return next((sentence for sentence in answers if sentence is not None), None)

    async def transport(self, method: str, messages: Sequence[Any] | None = None) -> list[Any]:
        """Calls `method` of the transport's end on every node except the first, each with one of `messages`; returns
        the results."""
        if messages is None:
            arguments: list[tuple[Any, ...]] = [(method,)] * self.count
        else:
            arguments = [(method, message) for message in messages]
        return await self._call("transport", self.deadline_s, arguments)

    async def stop(self, grace_s: float, deadline_s: float) -> None:
        """Ends the processes and the actors; another start needs new ones. Does not raise."""
        actors = self._actors
        self._actors = []
        stopping = [asyncio.ensure_future(_result(actor.stop.remote(grace_s))) for actor in actors]
        if stopping:
            await asyncio.wait(stopping, timeout=deadline_s)
        for task, actor in zip(stopping, actors, strict=True):
            task.cancel()
            ray.kill(actor)
        await asyncio.gather(*stopping, return_exceptions=True)

    async def _call(
        self, method: str, deadline_s: float, arguments: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Returns the results of `method` of all actors, each called with its arguments. Raises the SlimxError of the
        first that fails."""
        if arguments is None:
            arguments = [()] * self.count
        calls = []
        for actor, values in zip(self._actors, arguments, strict=True):
            calls.append(getattr(actor, method).remote(*values))
        return await gather(
            calls,
            what=method,
            holders=[f"machine {rank} of engine {self.name}" for rank in range(1, self.count + 1)],
            deadline_s=deadline_s,
            logs=self._logs,
        )


async def _result(reference: Any) -> Any:
    return await reference
