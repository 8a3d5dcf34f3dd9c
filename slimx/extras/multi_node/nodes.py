"""The nodes of a multi-node server other than the first: a Ray actor on each, and the group of these actors.

The actor on the first node (`slimx.engines.server.engine.Engine`) creates and owns the others. The other actors end
when this actor ends, and guard processes then end the server's processes on their nodes."""

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
    """Ray actor that runs a server's processes on one node other than the first."""

    def __init__(self, spec: EngineSpec, log_path: Path, network: str | None, make_end: Callable[[], End] | None):
        """Stores the settings that all starts of the server have in common.

        `spec`: the server's specification, without ports, address and node. `network`: network that contains this
        node's address (`slimx.runtime.ports.local_address`). `make_end`: factory of the transport's receiver on a node;
        None if the transport has none."""
        self.spec = spec
        self.log_path = log_path
        self.host = local_address(network)
        self.end = None if make_end is None else make_end()
        self.process: SupervisedProcess | None = None

    async def address(self) -> str:
        """Returns the IP address of this node at which the server's processes listen and from which they connect to
        other nodes."""
        return self.host

    async def start(self, share: NodeShare) -> None:
        spec = replace(self.spec, port=free_port(self.host), host=self.host, node=share)
        name = f"engine {spec.name}, node {share.rank}"
        keys = spec.keys.to_bytes()
        self.process = SupervisedProcess(name, server_argv(spec), self.log_path, server_env(spec), keys)
        self.process.start()
        if self.end is not None:
            await self.end.prepare(self.host)

    async def ended(self) -> str | None:
        """Returns a description of how the server's process on this node ended; None while it runs."""
        return None if self.process is None else self.process.ended()

    async def stop(self, grace_s: float) -> None:
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, grace_s)

    async def transport(self, method: str, *arguments: Any) -> Any:
        """Calls `method` of the transport's receiver on this node and returns the result."""
        return await getattr(self.end, method)(*arguments)


class Nodes:
    """Actors on all nodes of a server other than the first, called as a group."""

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        network: str | None,
        places: Sequence[Placement],
        make_end: Callable[[], End] | None,
        deadline_s: float,
    ):
        """Creates the actors without starting processes.

        `places`: placements of all nodes other than the first. `deadline_s`: deadline in seconds for one call to the
        transport's receivers. The other arguments are passed to each `NodeActor`.
        """
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
        """Starts the server's processes on all nodes other than the first. Returns the `NodeShare` of the first node,
        which then starts its part of the server. `host`: address of the first node."""
        hosts = (host, *await self._call("address", deadline_s))
        rendezvous = address(host, free_port(host))
        first, *shares = [NodeShare(rank, len(hosts), rendezvous, hosts) for rank in range(len(hosts))]
        await self._call("start", deadline_s, [(share,) for share in shares])
        return first

    async def ended(self, deadline_s: float) -> str | None:
        """Returns a description of how the first failed process ended; None if no process has ended or a node does not
        respond."""
        try:
            answers = await self._call("ended", deadline_s)
        except DeadlineError:
            return None
        except SlimxError as error:
            return str(error)
        return next((sentence for sentence in answers if sentence is not None), None)

    async def transport(self, method: str, messages: Sequence[Any] | None = None) -> list[Any]:
        """Calls `method` of the transport's receiver on every node other than the first, and returns the results in the
        order of the nodes. `messages`: one argument per node; None for calls without an argument."""
        if messages is None:
            arguments: list[tuple[Any, ...]] = [(method,)] * self.count
        else:
            arguments = [(method, message) for message in messages]
        return await self._call("transport", self.deadline_s, arguments)

    async def stop(self, grace_s: float, deadline_s: float) -> None:
        """Ends the processes and the actors; processes that have not exited after `grace_s` seconds are killed. Never
        raises. Starting the server again requires a new `Nodes` object."""
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
        """Calls `method` of all actors and returns the results in the order of the nodes.

        `arguments`: arguments for each actor; None for calls without arguments. If calls fail, raises the SlimxError of
        the first actor whose call failed."""
        if arguments is None:
            arguments = [()] * self.count
        calls = []
        for actor, values in zip(self._actors, arguments, strict=True):
            calls.append(getattr(actor, method).remote(*values))
        return await gather(
            calls,
            what=method,
            holders=[f"node {rank} of engine {self.name}" for rank in range(1, self.count + 1)],
            deadline_s=deadline_s,
            logs=self._logs,
        )


async def _result(reference: Any) -> Any:
    return await reference
