"""Transport "nixl" as the driver sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimx.engines.transport import Trainers, Transport
from slimx.reshard.parties import Delivery, Source

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.config.sections.publish import Publish
    from slimx.extras.direct.ends.engine_end import DirectEnd


class DirectTransport(Transport):
    """Transport in which every trainer rank writes its part of a bucket directly to every engine."""

    gathers = False

    def on_gpus(self, publish: Publish, device: str, *, colocate: bool) -> bool:
        """Returns True if trainers and engines keep buckets in GPU memory.

        This requires `publish.staging` "bucket" and no deltas. If trainers and engines share GPUs, the memory stays
        registered with NIXL while either sleeps, because neither torch nor SGLang's memory saver allocated it."""
        return device == "cuda" and publish.staging == "bucket" and publish.delta is None

    def end(self, publish: Publish) -> type[DirectEnd]:
        from slimx.extras.direct.ends.engine_end import DirectEnd

        return DirectEnd

    def connect(self, config: Config, trainers: Trainers, engines: Any, source: Source) -> tuple[Source, Delivery]:
        if engines is None:
            return super().connect(config, trainers, engines, source)
        from slimx.extras.direct.delivery import DirectDelivery, RankSenders, receivers_of
        from slimx.extras.direct.source import DirectSource

        senders = RankSenders(trainers)
        ranks = None
        if self.on_gpus(config.publish, engines.device, colocate=config.schedule.colocate):
            ranks = senders.published.targets
        delivery = DirectDelivery(
            senders,
            receivers_of({engine.name: engine.nodes for engine in engines.receivers}, ranks),
            step_deadline_s=config.publish.engine_deadline,
            changes=config.publish.changes,
            staggered=staggers(config),
        )
        return DirectSource(delivery), delivery


def staggers(config: Config) -> bool:
    """Returns True if engines receive buckets in different orders. With adapters that are merged for publication, they
    do not, because each rank would then merge the weights of several buckets at a time."""
    return config.trainer.lora is None
