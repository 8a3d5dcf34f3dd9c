"""Transport "nixl", on the driver's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimx.engines.transport import Trainers, Transport
from slimx.reshard.parties import Delivery, Source

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.config.sections.publish import Publish
    from slimx.extras.direct.ends.engine_end import DirectEnd


class DirectTransport(Transport):
    """Every trainer rank writes to every engine; see `slimx.engines.transport.Transport`."""

    gathers = False

    def on_gpus(self, publish: Publish, device: str, *, colocate: bool) -> bool:
        """Returns True if buckets need not be in host memory, and no GPU releases memory that would have to be
        registered again."""
        return device == "cuda" and publish.staging == "bucket" and publish.delta is None and not colocate

    def end(self, publish: Publish) -> type[DirectEnd]:
        from slimx.extras.direct.ends.engine_end import DirectEnd

        return DirectEnd

    def connect(self, config: Config, trainers: Trainers, engines: Any, source: Source) -> tuple[Source, Delivery]:
        if engines is None:
            return super().connect(config, trainers, engines, source)
        from slimx.extras.direct.delivery import DirectDelivery, DirectSource, RankSenders, receivers_of

        senders = RankSenders(trainers)
        ranks = None
        if self.on_gpus(config.publish, engines.device, colocate=config.schedule.colocate):
            ranks = senders.published.targets
        delivery = DirectDelivery(
            senders,
            receivers_of({engine.name: engine.nodes for engine in engines.engines}, ranks),
            step_deadline_s=config.publish.engine_deadline,
            changes=config.publish.changes,
        )
        return DirectSource(delivery), delivery
