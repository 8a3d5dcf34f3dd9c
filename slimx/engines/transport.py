"""Transports of packed buckets from the trainers to the engines, by `publish.transport`.

Entry points of `slimx.transports`:

memory    engines map the memory of the trainer ranks: one machine
cuda_ipc  engines copy from the memory of the trainer ranks' GPUs: one machine

Others are of extras. The part of one that runs on trainer ranks is a role of these (`slimx.roles`), the part at an
engine an `End`. Importing a transport loads neither torch nor Ray, without which a plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.reshard.parties import Delivery, Recipient, Source, TransportLost

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.config.sections.publish import Publish
    from slimx.reshard.manifest import Manifest
    from slimx.reshard.pack.pieces import PlannedBuckets
    from slimx.reshard.packed import PackedBucket


class Trainers(Protocol):
    """The trainer ranks (`slimx.orchestration.ranks.trainers.TrainerGroup`), which may be replaced."""

    actors: list[Any]
    """Those of the present ranks."""
    plans: Mapping[str, PlannedBuckets]
    """Plans by which weights leave them; "publish": that for one engine."""

    async def call(self, method: str, what: str, /, **arguments: Any) -> list[Any]: ...

    async def stored(self, values: Sequence[Any]) -> list[Any]: ...


class End(Protocol):
    """A transport's end on one machine of an engine, in the process that owns the server there."""

    async def prepare(self, host: str, nodes: Any = None) -> None:
        """Prepare for a start of the server. `host`: the machine's address; `nodes`: the server's other machines
        (`slimx.engines.server.server.Machines`)."""

    def landed(self, packed: PackedBucket) -> AbstractAsyncContextManager[PackedBucket]:
        """A bucket in memory that the server opens, for the time of the block."""


class Transport:
    """Memory of trainer ranks, in which engines open buckets."""

    gathers = True
    """True if all ranks bring their pieces of a bucket together in the memory of some (`TrainerGroup.pack`)."""

    def on_gpus(self, publish: Publish, device: str, *, colocate: bool) -> bool:
        """Returns True if buckets are in the memory of GPUs in a run on `device`, "cpu" or "cuda"."""
        return publish.on_device

    def end(self, publish: Publish) -> Callable[[], End] | None:
        """Returns the maker of ends at servers; None: servers open buckets in place."""
        return None

    def connect(self, config: Config, trainers: Trainers, engines: Any, source: Source) -> tuple[Source, Delivery]:
        """Returns the trainers as the publisher reads them and the delivery to `engines`, an `EngineGroup` or None.
        `source`: of gathered buckets."""
        return source, MemoryDelivery(trainers)


def transport_of(publish: Publish) -> Transport:
    """Returns the configured transport; for `auto`, as in a run without engines, memory."""
    name = "memory" if publish.transport == "auto" else publish.transport
    return entry_points.load("slimx.transports", name)()


class MemoryDelivery(Delivery):
    """Buckets that engines open in the memory of trainer ranks."""

    def __init__(self, trainers: Trainers):
        self.trainers = trainers
        self._owners: Sequence[Any] = ()
        """The actors that pack the present publication."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._owners = list(self.trainers.actors)

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        try:
            await super().bring(recipient, epoch, packed, bucket)
        except SlimxError as error:
            from slimx.cluster.waiting import has_died

            # No engine is to blame for a bucket whose owner has died.
            if self._owners and await has_died(*self._owners):
                raise TransportLost(
                    f"a trainer rank died before a bucket was taken: {error}", code="publish.source", about="trainers"
                ) from error
            raise
