"""How packed buckets get from the trainers to the engines: `publish.transport`.

    memory   engines map the publisher's memory: one machine
    gloo     a courier beside the publisher sends each bucket to a process beside each engine, whose server maps it
    disk     the courier writes each bucket to a file that engines map: a shared file system. A complete version stays
             there, and an engine that comes back catches up from it while the trainers train

The courier is a process of its own, on the machine of the publishing trainer: it sends one bucket while the trainers
pack the next, and a transport that breaks takes no trainer along.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.config.schema import Config
from slimx.orchestration.engine_actor import EngineHandle
from slimx.orchestration.recovery import Membership
from slimx.orchestration.waiting import gather
from slimx.reshard.gather import PUBLISHER
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import ReceiverLost
from slimx.reshard.transports.collective import ChannelError, Meeting, Opening, Sending
from slimx.reshard.transports.disk import Shelf, Stored, newest
from slimx.reshard.transports.memory import open_memory


class Trainers(Protocol):
    """The trainers, and the actors of their ranks."""

    actors: list[Any]

    async def forms(self) -> list[dict[str, str]]: ...

    async def bucket_count(self) -> int: ...

    async def gather(self, bucket: int) -> PackedBucket: ...

    async def release(self, bucket: int | None = None) -> None: ...


class MemoryTransport:
    """The trainers as the publisher's source; engines map the memory that the buckets are in."""

    keeps = False
    """Whether a published version can be published again without the trainers (`complete`)."""

    def __init__(self, trainers: Trainers):
        self.trainers = trainers

    async def begin(self, manifest: Manifest) -> None: ...

    async def forms(self) -> list[dict[str, str]]:
        return await self.trainers.forms()

    async def bucket_count(self) -> int:
        return await self.trainers.bucket_count()

    async def gather(self, bucket: int) -> PackedBucket:
        return await self.trainers.gather(bucket)

    async def release(self, bucket: int | None = None) -> None:
        await self.trainers.release(bucket)

    def complete(self, version: int) -> Stored | None:
        """`version` as it is kept."""
        return None

    async def connect(self, engine: EngineHandle, manifest: Manifest) -> None:
        """Make sure that buckets can reach `engine`."""

    async def deliver(self, engine: EngineHandle, packed: PackedBucket, bucket: int) -> None:
        """Bring a bucket to `engine` and have it staged there."""
        await engine.stage_mapped(packed, bucket)

    async def stop(self) -> None: ...


class Courier:
    """Sends or writes buckets of the publisher's memory; a Ray actor whose calls run in threads."""

    def __init__(self, directory: str, host: str | None, deadline_s: float, log_path: str):
        """`directory`: of versions on disk; `host`: where meetings are held, None for this machine's address;
        `deadline_s`: seconds for one step of a channel; what the process prints goes to `log_path`."""
        with open(log_path, "ab", buffering=0) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        self.shelf, self.deadline_s = Shelf(directory), deadline_s
        self.host = host or ray.util.get_node_ip_address()
        self.openings: dict[str, Opening] = {}
        self.channels: dict[str, Sending] = {}

    def ready(self) -> None:
        """Answers once the process has started."""

    def begin(self, manifest: Manifest) -> None:
        self.shelf.begin(manifest)

    def write(self, bucket: int, packed: PackedBucket) -> PackedBucket:
        return self.shelf.add(bucket, packed, open_memory(packed.path, packed.size))

    def commit(self) -> None:
        self.shelf.commit()

    def open(self, engine: str, epoch: int) -> Meeting:
        """Open a meeting for `engine`; the channel that it had is closed."""
        if (old := self.channels.pop(engine, None)) is not None:
            old.close()
        opening = Sending.open(engine, epoch, ranks=1, host=self.host, backend="gloo", deadline_s=self.deadline_s)
        self.openings[engine] = opening
        return opening.meeting

    def join(self, engine: str) -> None:
        self.channels[engine] = self.openings.pop(engine).join()

    def send(self, engine: str, packed: PackedBucket) -> None:
        self.channels[engine].broadcast(open_memory(packed.path, packed.size))


class _CourierTransport(MemoryTransport):
    """Buckets that a courier takes from the publisher's memory."""

    def __init__(self, trainers: Trainers, config: Config, log: Path):
        super().__init__(trainers)
        self.config, self.log = config, log
        self.directory = Path(config.publish.directory or Path(config.run.dir, "publish")).absolute()
        self._courier: Any = None

    async def begin(self, manifest: Manifest) -> None:
        if self._courier is None:
            self._courier = await self._start()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        reference = getattr(self._courier, method).remote(*arguments)
        return await self._answer(reference, method, 2 * self.config.publish.step_deadline)

    async def _start(self) -> Any:
        limit = self.config.cluster.start_deadline
        where = self.trainers.actors[PUBLISHER].__ray_call__.remote(
            lambda worker: ray.get_runtime_context().get_node_id()
        )
        beside = NodeAffinitySchedulingStrategy(
            await self._answer(where, "the look for its machine", limit), soft=False
        )
        engines = sum(group.count for group in self.config.rollout.engines)
        actor = ray.remote(Courier).options(num_cpus=0, max_concurrency=engines + 1, scheduling_strategy=beside)
        host = "127.0.0.1" if self.config.cluster.ray_address is None else None
        courier = actor.remote(str(self.directory), host, self.config.publish.step_deadline, str(self.log))
        await self._answer(courier.ready.remote(), "the start", limit)
        return courier

    async def _answer(self, reference: Any, what: str, deadline_s: float) -> Any:
        (out,) = await gather(
            [reference],
            what=f"{what} of the courier",
            holders=["the courier beside trainer rank 0"],
            deadline_s=deadline_s,
            logs=[self.log],
        )
        return out

    async def stop(self) -> None:
        if self._courier is not None:
            ray.kill(self._courier)


class DiskTransport(_CourierTransport):
    """Through files."""

    keeps = True
    _unwritten = -1
    """Buckets of the present publication that are not on disk yet."""

    async def begin(self, manifest: Manifest) -> None:
        await super().begin(manifest)
        self._unwritten = await self.bucket_count()
        await self._ask("begin", manifest)

    async def gather(self, bucket: int) -> PackedBucket:
        packed = await super().gather(bucket)
        written = await self._ask("write", bucket, packed)
        await self.trainers.release(bucket)
        self._unwritten -= 1
        return written

    async def release(self, bucket: int | None = None) -> None:
        if bucket is None:
            await self.trainers.release()
            if self._unwritten == 0:
                self._unwritten = -1
                await self._ask("commit")

    def complete(self, version: int) -> Stored | None:
        stored = newest(self.directory)
        return stored if stored is not None and stored.manifest.version == version else None


class GlooTransport(_CourierTransport):
    """Over the network."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._connected: dict[str, int] = {}
        """By engine the incarnation that a channel was made to."""

    async def connect(self, engine: EngineHandle, manifest: Manifest) -> None:
        if self._connected.get(engine.name) == engine.incarnation:
            return
        try:
            meeting = await self._ask("open", engine.name, manifest.membership_epoch)
            await asyncio.gather(self._ask("join", engine.name), engine.join(meeting))
        except ChannelError as error:
            raise ReceiverLost(str(error)) from None
        self._connected[engine.name] = engine.incarnation

    async def deliver(self, engine: EngineHandle, packed: PackedBucket, bucket: int) -> None:
        try:
            await asyncio.gather(self._ask("send", engine.name, packed), engine.stage_received(packed, bucket))
        except ChannelError as error:
            raise ReceiverLost(str(error)) from None


TRANSPORTS: Mapping[str, type[_CourierTransport]] = {"disk": DiskTransport, "gloo": GlooTransport}


def make_transport(trainers: Trainers, config: Config, log_dir: Path) -> MemoryTransport:
    """The transport that `publish.transport` names."""
    if config.publish.transport == "memory":
        return MemoryTransport(trainers)
    return TRANSPORTS[config.publish.transport](trainers, config, log_dir / "courier.log")


class Joining:
    """Of a membership only the engines that no version reached yet, for a publication to them alone."""

    def __init__(self, members: Membership):
        self.quarantine, self.admit, self.candidates = members.quarantine, members.admit, members.joining
        self._members = members

    @property
    def epoch(self) -> int:
        return self._members.epoch
