"""Interface of transports, which deliver packed buckets from trainers to engines, and the transports for a single node.

Entry points of `slimx.transports`, by their name in `publish.transport`:

memory    engines map the host memory of the trainer ranks
cuda_ipc  engines copy from the memory of the trainer ranks' GPUs

Packages in slimx/extras add other transports. On trainer ranks a transport may have a role (entry points `slimx.roles`)
that sends, and at an engine a receiver, which is an `End`. Importing a transport loads neither torch nor Ray, because
plans are made without them."""

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
    """Interface of the trainer ranks (`slimx.orchestration.ranks.trainers.TrainerGroup`), which may be replaced during
    a run."""

    actors: list[Actor]
    """Ray actors of the current trainer ranks, by rank."""
    plans: Mapping[str, PlannedBuckets]
    """Transfer plans by name, with the layouts of their buckets; "publish" is the plan for publications to one
    engine."""

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
    """A transport's receiver on one node of an engine, in the process that owns the server there."""

    async def prepare(self, host: str, nodes: Any = None) -> None:
        """Prepares a start of the server.

        `host`: address of this node. `nodes`: the server's other nodes (`slimx.engines.server.server.Machines`), or
        None."""

    def landed(self, packed: PackedBucket) -> AbstractAsyncContextManager[PackedBucket]:
        """Yields the bucket that `packed` describes, in memory that the server can open until the block ends."""


class Transport:
    """Base class of transports. With the base class itself, engines open buckets in the memory of trainer ranks."""

    gathers = True
    """True if each bucket is gathered in the memory of one or more trainer ranks (`TrainerGroup.pack`); False if every
    rank sends its own part."""

    def on_gpus(self, publish: Publish, device: str, *, colocate: bool) -> bool:
        """Returns True if buckets are in GPU memory in a run on `device`, "cpu" or "cuda". `colocate`: True if trainers
        and engines share devices."""
        return publish.on_device

    def end(self, publish: Publish) -> Callable[[], End] | None:
        """Returns the factory of the transport's receivers at engines, or None if engines open buckets without such a
        receiver."""
        return None

    def connect(self, config: Config, trainers: Trainers, engines: object, source: Source) -> tuple[Source, Delivery]:
        """Connects trainers with engines; returns the source from which the publisher takes buckets, and the delivery.

        `engines`: an `EngineGroup`, or None in a run without engines. `source`: source whose buckets are gathered on
        trainer ranks."""
        return source, MemoryDelivery(trainers)


def transport_of(publish: Publish) -> Transport:
    """Returns the transport that `publish.transport` names; the value "auto", which remains unresolved in a run without
    engines, selects "memory"."""
    name = "memory" if publish.transport == "auto" else publish.transport
    return entry_points.load("slimx.transports", name)()


class MemoryDelivery(Delivery):
    """Delivery of buckets that engines open in the memory of trainer ranks."""

    def __init__(self, trainers: Trainers):
        self.trainers = trainers
        self._owners: Sequence[Actor] = ()
        """Actors of the trainer ranks that pack the buckets of the current publication."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._owners = list(self.trainers.actors)

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        try:
            await super().bring(recipient, epoch, packed, bucket)
        except SlimxError as error:
            from slimx.cluster.waiting import has_died

            # The engine did not cause the error if the rank whose memory has the bucket has died.
            if self._owners and await has_died(*self._owners):
                raise TransportLost(
                    f"a trainer rank died before engine {recipient.name} had copied bucket {bucket} ({error}); find "
                    "the cause in the trainers' logs",
                    code="publish.source",
                    about="trainers",
                ) from error
            raise
