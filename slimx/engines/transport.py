"""Transports of packed buckets from the trainers to the engines, by `publish.transport`.

Entry points of `slimx.transports`:

memory    engines map the memory of the trainer ranks: one node
cuda_ipc  engines copy from the memory of the trainer ranks' GPUs: one node

Extras add others. The part of a transport on trainer ranks is one of their roles (`slimx.roles`), the part at an engine
an `End`. Importing a transport loads neither torch nor Ray, which a plan runs without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.reshard.parties import Delivery, Recipient, Source, TransportLost

if TYPE_CHECKING:
    import ray

    from slimx.cluster.place import Actor
    from slimx.config.schema import Config
    from slimx.config.sections.publish import Publish
    from slimx.reshard.manifest import Manifest
    from slimx.reshard.pack.pieces import PlannedBuckets
    from slimx.reshard.packed import PackedBucket


class Trainers(Protocol):
    """The trainer ranks (`slimx.orchestration.ranks.trainers.TrainerGroup`), which may be replaced during a run."""

    actors: list[Actor]
    """Actors of the current ranks."""
    plans: Mapping[str, PlannedBuckets]
    """Transfer plans of the weights; "publish": the plan for one engine."""

    async def call(
        self,
        method: str,
        what: str,
        /,
        *,
        per_rank: Sequence[tuple[object, ...]] | None = None,
        ranks: Sequence[int] | None = None,
        **arguments: object,
    ) -> list[Any]: ...

    async def stored(self, values: Sequence[object]) -> list[ray.ObjectRef]: ...


class End(Protocol):
    """A transport's end on one node of an engine, in the process that owns the server there."""

    async def prepare(self, host: str, nodes: Any = None) -> None:
        """Prepares for a start of the server. `host`: address of the node; `nodes`: the server's other nodes
        (`slimx.engines.server.server.Machines`)."""

    def landed(self, packed: PackedBucket) -> AbstractAsyncContextManager[PackedBucket]:
        """Yields a bucket in memory that the server can open until the block ends."""


class Transport:
    """Engines open buckets in the memory of trainer ranks."""

    gathers = True
    """True if ranks gather their pieces of a bucket in the memory of some of them (`TrainerGroup.pack`)."""

    def on_gpus(self, publish: Publish, device: str, *, colocate: bool) -> bool:
        """Returns True if buckets are in GPU memory in a run on `device`, "cpu" or "cuda"."""
        return publish.on_device

    def end(self, publish: Publish) -> Callable[[], End] | None:
        """Returns the factory of ends at servers, or None if servers open buckets in place."""
        return None

    def connect(self, config: Config, trainers: Trainers, engines: object, source: Source) -> tuple[Source, Delivery]:
        """Returns the trainers as the publisher's source and the delivery to `engines`, an `EngineGroup` or None.
        `source`: source of gathered buckets."""
        return source, MemoryDelivery(trainers)


def transport_of(publish: Publish) -> Transport:
    """Returns the configured transport; memory for `auto`, as in a run without engines."""
    name = "memory" if publish.transport == "auto" else publish.transport
    return entry_points.load("slimx.transports", name)()


class MemoryDelivery(Delivery):
    """Delivers buckets that engines open in the memory of trainer ranks."""

    def __init__(self, trainers: Trainers):
        self.trainers = trainers
        self._owners: Sequence[Actor] = ()
        """Actors that pack the current publication."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._owners = list(self.trainers.actors)

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        try:
            await super().bring(recipient, epoch, packed, bucket)
        except SlimxError as error:
            from slimx.cluster.waiting import has_died

            # The engine is not at fault for a bucket whose owner has died.
            if self._owners and await has_died(*self._owners):
                raise TransportLost(
                    f"a trainer rank died before a bucket was taken: {error}", code="publish.source", about="trainers"
                ) from error
            raise
