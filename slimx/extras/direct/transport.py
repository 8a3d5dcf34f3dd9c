"""Transport "nixl": the driver's side of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimx.engines.transport import Trainers, Transport
from slimx.reshard.parties import Delivery, Source

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.config.sections.publish import Publish
    from slimx.extras.direct.ends.copies import SentBucket
    from slimx.extras.direct.ends.end import DirectEnd
    from slimx.extras.direct.ends.offer import Offer
    from slimx.reshard.plan.copy_plan import Plan


class DirectTransport(Transport):
    """Every trainer rank writes to every engine; see `slimx.engines.transport.Transport`."""

    gathers = False

    def on_gpus(self, publish: Publish, device: str, *, colocate: bool) -> bool:
        """True if nothing has to be found in buckets on the host, and no GPU gives memory back that would have to be
        registered anew."""
        return device == "cuda" and publish.staging == "bucket" and publish.delta is None and not colocate

    def end(self, publish: Publish) -> type[DirectEnd]:
        from slimx.extras.direct.ends.end import DirectEnd

        return DirectEnd

    def connect(self, config: Config, trainers: Trainers, engines: Any, source: Source) -> tuple[Source, Delivery]:
        if engines is None:
            return super().connect(config, trainers, engines, source)
        from slimx.extras.direct.delivery import DirectDelivery, DirectSource, receivers_of

        senders, ranks = RankSenders(trainers), None
        if self.on_gpus(config.publish, engines.device, colocate=config.schedule.colocate):
            ranks = senders.published.targets
        delivery = DirectDelivery(
            senders,
            receivers_of({engine.name: engine.nodes for engine in engines.engines}, ranks),
            step_deadline_s=config.publish.engine_deadline,
            changes=config.publish.changes,
        )
        return DirectSource(delivery), delivery


class RankSenders:
    """The trainer ranks of a run, as the delivery calls them."""

    def __init__(self, trainers: Trainers):
        self.trainers = trainers

    @property
    def actors(self) -> list[Any]:
        return self.trainers.actors

    @property
    def published(self) -> Plan:
        """The plan by which weights leave the present ranks for one engine."""
        return self.trainers.plans["publish"].plan

    async def prepare(self, dealt: Plan, edges: list[int], item: int, on_gpus: bool) -> None:
        """Bring a dealt plan to all ranks, in which the targets of each receiver of an engine begin at one of `edges`;
        `item`: bytes of an element where changes travel, 0 where whole weights do; `on_gpus`: whether bytes travel
        from the memory of GPUs."""
        (stored,) = await self.trainers.stored([dealt.to_bytes()])
        arguments = {"plan": stored, "edges": edges, "item": item, "on_gpu": on_gpus}
        await self.trainers.call("direct.prepare", "the plan of direct transfers", **arguments)

    async def connect(self, engine: int, offer: Offer) -> None:
        """Have every rank get to know the memory of `engine`."""
        each = [(offer.of(rank).to_bytes(),) for rank in range(len(self.actors))]
        what = f"the meeting with engine {offer.engine}"
        await self.trainers.call("direct.connect", what, each=each, engine=engine)

    async def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        """Have every rank pack its part of a bucket and begin to write it to `engines`, each with the transfer whose
        bytes of it the engine holds (`slimx.extras.direct.ends.sender.Sender.send`)."""
        arguments = {"bucket": bucket, "transfer": transfer, "engines": engines}
        return await self.trainers.call("direct.send", f"the packing of bucket {bucket} (publish)", **arguments)
