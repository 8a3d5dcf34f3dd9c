"""How packed buckets get from the trainers to the engines: `publish.transport`.

memory    engines map the publisher's memory: one machine
cuda_ipc  engines copy from the memory of the publisher's GPU: one machine
gloo      a courier beside the publisher sends each bucket to a process beside each engine, whose server maps it
nccl      the same between GPUs: the server copies from the memory of the engine's first one
disk      the courier writes each bucket to a file that engines map: a shared file system. A complete version stays
          there, and an engine that comes back catches up from it while the trainers train
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from slimx.cluster.restarts import Restarts
from slimx.config.schema import Config
from slimx.engines.delivery.courier import CourierHandle
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.fleet.membership import Membership
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.gather import PUBLISHER
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import ReceiverLost
from slimx.reshard.transports.collective import Backend, ChannelError
from slimx.reshard.transports.disk import Stored, newest

PATIENCE = 0.8
"""Of the deadline of a step, the share after which the courier is asked why nothing has come."""


class Trainers(Protocol):
    """The trainers, and the actors of their ranks."""

    actors: list[Any]

    async def forms(self) -> list[dict[str, str]]: ...

    async def bucket_count(self) -> int: ...

    async def gather(self, bucket: int) -> PackedBucket: ...

    async def release(self, bucket: int | None = None) -> None: ...


class MemoryTransport:
    """The trainers as the publisher's source; engines open the memory that the buckets are in."""

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


class _CourierTransport(MemoryTransport):
    """Buckets that a courier takes from the publisher's memory."""

    def __init__(self, trainers: Trainers, config: Config, log: Path, restarts: Restarts | None = None):
        """`restarts`: those that the courier may have; None: as configured, and nobody is told."""
        super().__init__(trainers)
        restarts = restarts or Restarts("courier", config.rollout.health, note=lambda text: None)
        self.directory = Path(config.publish.directory or Path(config.run.dir, "publish")).absolute()
        self.courier = CourierHandle(trainers.actors[PUBLISHER], config, self.directory, log, restarts)

    async def begin(self, manifest: Manifest) -> None:
        await self.courier.start()

    async def stop(self) -> None:
        await self.courier.stop()


class DiskTransport(_CourierTransport):
    """Through files."""

    keeps = True
    _unwritten = -1
    """Buckets of the present publication that are not on disk yet."""

    async def begin(self, manifest: Manifest) -> None:
        await super().begin(manifest)
        self._unwritten = await self.bucket_count()
        await self.courier.ask("begin", manifest)

    async def gather(self, bucket: int) -> PackedBucket:
        packed = await super().gather(bucket)
        written = await self.courier.ask("write", bucket, packed)
        await self.trainers.release(bucket)
        self._unwritten -= 1
        return written

    async def release(self, bucket: int | None = None) -> None:
        if bucket is None:
            await self.trainers.release()
            if self._unwritten == 0:
                self._unwritten = -1
                await self.courier.ask("commit")

    def complete(self, version: int) -> Stored | None:
        stored = newest(self.directory)
        return stored if stored is not None and stored.manifest.version == version else None


class ChannelTransport(_CourierTransport):
    """Over the network, by a process group for each engine."""

    backend: Backend

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.step_deadline_s = self.courier.config.publish.step_deadline
        self._connected: dict[str, tuple[int, int]] = {}
        """By engine the incarnations, of the courier and its own, between which there is a channel."""

    async def connect(self, engine: EngineHandle, manifest: Manifest) -> None:
        ends = self.courier.incarnation, engine.incarnation
        if self._connected.get(engine.name) == ends:
            return
        async with self._blaming(engine, "the meeting"):
            meeting = await self.courier.ask("open", engine.name, manifest.membership_epoch, self.backend, engine.nodes)
            await asyncio.gather(self.courier.ask("join", engine.name), engine.join(meeting))
        self._connected[engine.name] = ends

    async def deliver(self, engine: EngineHandle, packed: PackedBucket, bucket: int) -> None:
        async with self._blaming(engine, f"bucket {bucket}"):
            await asyncio.gather(self.courier.ask("send", engine.name, packed), engine.stage_received(packed, bucket))

    @asynccontextmanager
    async def _blaming(self, engine: EngineHandle, what: str) -> AsyncIterator[None]:
        """A channel that broke, or is late, is its engine's fault, unless the courier is gone, or does not answer
        either: then that is what is raised. All within the deadline of one step."""
        patience = PATIENCE * self.step_deadline_s
        try:
            async with asyncio.timeout(patience):
                yield
        except TimeoutError:
            error = f"engine {engine.name} did not answer {what} of the {self.backend} channel within {patience:.0f} s"
        except ChannelError as broken:
            error = str(broken)
        else:
            return
        await self.courier.ask("ready", deadline_s=(1 - PATIENCE) / 2 * self.step_deadline_s)
        raise ReceiverLost(error)


class GlooTransport(ChannelTransport):
    """From host memory to host memory."""

    backend = "gloo"


class NcclTransport(ChannelTransport):
    """From the memory of the publisher's GPU to that of an engine's first one."""

    backend = "nccl"


TRANSPORTS: Mapping[str, type[_CourierTransport]] = {
    "disk": DiskTransport,
    "gloo": GlooTransport,
    "nccl": NcclTransport,
}


def make_transport(
    trainers: Trainers, config: Config, log_dir: Path, restarts: Restarts | None = None
) -> MemoryTransport:
    """The transport that `publish.transport` names. `restarts`: of its courier, if it has one."""
    if config.publish.transport in ("memory", "cuda_ipc"):  # buckets differ, what is done with them does not
        return MemoryTransport(trainers)
    return TRANSPORTS[config.publish.transport](trainers, config, log_dir / "courier.log", restarts)


class Joining:
    """Of a membership only the engines that no version reached yet, for a publication to them alone."""

    def __init__(self, members: Membership):
        self.quarantine, self.admit, self.candidates = members.quarantine, members.admit, members.joining
        self._members = members

    @property
    def epoch(self) -> int:
        return self._members.epoch
