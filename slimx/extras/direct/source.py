"""Source of the buckets of direct transfers: the trainer ranks, which each send their part."""

from __future__ import annotations

from slimx.extras.direct import SLOTS
from slimx.extras.direct.delivery import DirectDelivery
from slimx.extras.direct.ends.sent_bucket import describe_copies
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket


class DirectSource:
    """Source of a publication in which each trainer rank sends its part of a bucket."""

    def __init__(self, delivery: DirectDelivery):
        self.delivery = delivery

    async def begin(self, manifest: Manifest) -> None:
        """Does nothing, because no preparation is needed before ranks pack."""

    async def forms(self) -> list[dict[str, str]]:
        return self.delivery.buckets.forms()

    async def bucket_count(self) -> int:
        return self.delivery.plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        """Makes every rank pack its part of `bucket` and start sending it. On return the bucket is in flight, and its
        description for the first engine is returned; each engine is given its own (`DirectDelivery.bring`)."""
        delivery = self.delivery
        if delivery.broken is not None:
            raise delivery.broken
        taking = {receiver: bases[bucket] for receiver, bases in sorted(delivery.taking.items())}
        sent = await delivery.senders.send(bucket, delivery.transfer, taking)
        for rank, part in enumerate(sent):
            delivery.wire = (delivery.wire or 0) + part.nbytes
            for receiver, reason in part.failed.items():
                delivery.failed.setdefault(receiver, (f"trainer rank {rank}", reason))
        turns = delivery.spread.turns
        described = describe_copies(
            delivery.buckets,
            turns,
            [part.contribution for part in sent],
            delivery.sums,
            transfer=delivery.transfer,
            bucket=bucket,
        )
        delivery.described[bucket] = described
        delivery.described.pop(bucket - SLOTS, None)
        return described[turns[0]]

    async def release(self, bucket: int | None = None) -> None:
        """Does nothing, because memory of a packed bucket is reused when another bucket needs it."""
