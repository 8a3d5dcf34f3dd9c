"""Ways of packed buckets from the publisher to the engines: `publish.transport`.

memory    engines map the memory of the trainer ranks: one machine
cuda_ipc  engines copy from the memory of the trainer ranks' GPUs: one machine
gloo      a courier beside the publisher sends each bucket to a process beside each engine, whose server maps it
nccl      the same between GPUs: the server copies from the memory of the engine's first one
nixl      every trainer rank writes to a process beside each engine: `slimx.engines.delivery.direct`
disk      the courier writes each bucket, or what has changed in it, to a file: a shared file system. Engines map it, or
          have it put together beside them. A complete version stays there, and an engine that comes back catches up
          from it while the trainers train
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

from slimx.cluster.restarts import Restarts
from slimx.cluster.waiting import has_died
from slimx.config.schema import Config
from slimx.engines.delivery.courier import CourierHandle
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.gather import PUBLISHER
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, ReceiverLost, Recipient, TransportLost
from slimx.reshard.transports.collective import Backend, ChannelError
from slimx.reshard.transports.disk import StoredVersion, newest

PATIENCE = 0.8
"""Share of a step's deadline after which the courier is asked why nothing has come."""


class MemoryDelivery(Delivery):
    """Buckets that engines open in the memory of trainer ranks."""

    def __init__(self, owners: Callable[[], Sequence[Any]]):
        """`owners`: gives the present actors of the trainer ranks whose memory that is."""
        self.owners = owners
        self._owners: Sequence[Any] = ()
        """The actors that pack the present publication."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._owners = self.owners()

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        async with self._owned():
            await super().bring(recipient, epoch, packed, bucket)

    @asynccontextmanager
    async def _owned(self) -> AsyncIterator[None]:
        """No engine is to blame for a bucket whose owner has died: TransportLost is raised then."""
        try:
            yield
        except TransportLost:
            raise
        except SlimxError as error:
            if self._owners and await has_died(*self._owners):
                raise TransportLost(
                    f"a trainer rank died before a bucket was taken: {error}", code="publish.source", about="trainers"
                ) from error
            raise


class CourierDelivery(MemoryDelivery):
    """Buckets that a courier takes from the publisher's memory."""

    def __init__(self, courier: CourierHandle):
        super().__init__(lambda: [courier.publisher()])
        self.courier = courier

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        await super().begin(manifest, buckets)
        await self.courier.start()

    def renew(self) -> None:
        self.courier.renew()

    async def stop(self) -> None:
        await self.courier.stop()


class DiskDelivery(CourierDelivery):
    """Through files."""

    keeps = True
    _unwritten = -1
    """Buckets of the present publication that are not on disk yet."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        await super().begin(manifest, buckets)
        self._unwritten, self.wire = buckets, 0
        await self.courier.ask("begin", manifest)

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        written: PackedBucket = await self.courier.ask("write", bucket, packed)
        self._unwritten -= 1
        self.wire = (self.wire or 0) + (written.chain[-1].nbytes if written.chain else written.size)
        return written

    async def end(self) -> None:
        if self._unwritten == 0:
            self._unwritten = -1
            await self.courier.ask("commit")

    def kept(self, version: int) -> StoredVersion | None:
        stored = newest(self.courier.directory)
        return stored if stored is not None and stored.manifest.version == version else None


class ChannelDelivery(CourierDelivery):
    """Over the network, by a process group for each engine."""

    def __init__(self, courier: CourierHandle, backend: Backend, step_deadline_s: float):
        """`backend`: "gloo" moves host memory, "nccl" that of the publisher's GPU to an engine's first one.
        `step_deadline_s`: seconds for one call to one engine."""
        super().__init__(courier)
        self.backend, self.step_deadline_s = backend, step_deadline_s
        self._connected: dict[str, tuple[int, int]] = {}
        """By engine the incarnations, of the courier and its own, between which there is a channel."""

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        ends = self.courier.incarnation, recipient.incarnation
        if self._connected.get(recipient.name) == ends:
            return
        async with self._blaming(recipient, "the meeting"):
            meeting = await self.courier.ask("open", recipient.name, epoch, self.backend, recipient.nodes)
            await asyncio.gather(self.courier.ask("join", recipient.name), recipient.perform("join", epoch, meeting))
        self._connected[recipient.name] = ends

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        try:
            async with self._owned(), self._blaming(recipient, f"bucket {bucket}"):
                received = recipient.perform("receive", epoch, packed, bucket)
                await asyncio.gather(self.courier.ask("send", recipient.name, packed), received)
        except BaseException:
            # The engine may wait for a bucket that is not sent any more: what comes next must not be taken for it.
            self._connected.pop(recipient.name, None)
            raise

    @asynccontextmanager
    async def _blaming(self, recipient: Recipient, what: str) -> AsyncIterator[None]:
        """A channel that broke, or is late, is its engine's fault, unless the courier is gone, or does not answer
        either: then that is what is raised. All within the deadline of one step."""
        patience = PATIENCE * self.step_deadline_s
        try:
            async with asyncio.timeout(patience):
                yield
        except TimeoutError:
            error = (
                f"engine {recipient.name} did not answer {what} of the {self.backend} channel within {patience:.0f} s"
            )
        except ChannelError as broken:
            error = str(broken)
        else:
            return
        await self.courier.ask("ready", deadline_s=(1 - PATIENCE) / 2 * self.step_deadline_s)
        raise ReceiverLost(error, code="channel.lost", about=recipient.name)


def make_delivery(ranks: Callable[[], Sequence[Any]], config: Config, log_dir: Path, restarts: Restarts) -> Delivery:
    """The delivery that `publish.transport` names. Raises SlimxError for a name that has none.

    `ranks`: gives the present actors of all trainer ranks; `restarts`: those of the courier, where there is one.
    """
    options = config.publish
    # Buckets of memory and cuda_ipc differ, what is done with them does not. A run of nixl that comes here publishes to
    # no engine: else its delivery is `slimx.engines.delivery.direct.DirectDelivery`.
    if options.transport in ("memory", "cuda_ipc", "nixl"):
        return MemoryDelivery(ranks)
    directory = Path(options.directory or Path(config.run.dir, "publish")).absolute()
    courier = CourierHandle(lambda: ranks()[PUBLISHER], config, directory, log_dir / "courier.log", restarts)
    if options.transport == "disk":
        return DiskDelivery(courier)
    if options.transport in get_args(Backend):
        return ChannelDelivery(courier, options.transport, options.engine_deadline)
    raise SlimxError(
        f"publish.transport {options.transport} has no delivery; add one to slimx/engines/delivery/deliveries.py",
        code="publish.transport",
        about=options.transport,
    )
