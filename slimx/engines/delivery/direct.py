"""Weights that every trainer rank writes straight to every engine, over NIXL: the driver's side, which sees no weight.

    DirectSource.gather(b)     every rank packs its part of bucket b, and begins to write it to all engines
    DirectDelivery.bring(b)    an engine waits for what the ranks write, makes the bucket of it, and stages it

Bucket b + 1 is packed and on its way while b is proven. Which rank writes what to whom was dealt out once
(`slimx.reshard.plan.dealing`). An engine that is lost gets nothing more; the others do not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slimx.errors import PartLost, SlimxError
from slimx.reshard.direct.copies import describe_copies
from slimx.reshard.direct.offer import Offer
from slimx.reshard.direct.receiver import Invitation
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.packer import Share
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, ReceiverLost, Recipient
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.dealing import deal, only

PATIENCE = 0.8
"""Share of a step's deadline in which a bucket must have come: what is missing is told before the step is late."""


class Senders(Protocol):
    """The trainer ranks."""

    async def prepare_direct(self, dealt: Plan, ranks: int) -> None: ...

    async def connect_direct(self, engine: int, offer: Offer) -> None: ...

    async def send_direct(
        self, bucket: int, transfer: int, engines: list[int]
    ) -> list[tuple[Share, dict[int, str]]]: ...


class DirectDelivery(Delivery):
    """Direct transfers to the engines of a run, as the publisher sees them from the engines' end."""

    def __init__(
        self,
        senders: Senders,
        plan: Plan,
        engines: Sequence[str],
        *,
        ranks: int,
        step_deadline_s: float,
        links: Sequence[int] = (),
    ):
        """`plan`: for one engine. `engines`: names of all. `ranks`: of the trainer, which send through `links`
        (`slimx.reshard.plan.dealing.deal`). `step_deadline_s`: seconds for one call to one engine."""
        self.senders, self.plan, self.step_deadline_s = senders, plan, step_deadline_s
        self.dealt = deal(plan, ranks=ranks, engines=len(engines), links=links)
        self.engines = {name: number for number, name in enumerate(engines)}
        self.transfer = 0
        """Number of the publication under way, or of the last one."""
        self.taking: set[int] = set()
        """Engines that take part in it."""
        self.failed: dict[int, str] = {}
        """By engine why a trainer rank could not write to it."""
        self.broken: SlimxError | None = None
        """Why the trainers cannot send any more."""
        self._connected: dict[str, int] = {}
        """By engine the incarnation whose memory the trainer ranks know."""
        self._prepared = False

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        if not self._prepared:
            await self.senders.prepare_direct(self.dealt, self.plan.targets)
            self._prepared = True
        self.transfer += 1
        self.taking, self.failed = set(), {}

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        number = self.engines[recipient.name]
        if self._connected.get(recipient.name) != recipient.incarnation:
            self._connected.pop(recipient.name, None)
            first = number * self.plan.targets
            parts = tuple(only(self.dealt, first + rank).to_bytes() for rank in range(self.plan.targets))
            name = f"engine {recipient.name} (start {recipient.incarnation}, transfer {self.transfer})"
            invitation = Invitation(name, parts, PATIENCE * self.step_deadline_s)
            offer: Offer = await recipient.perform("join", epoch, invitation)
            try:
                await self.senders.connect_direct(number, offer)
            except PartLost as error:  # no engine's fault: the next bucket tells
                self.broken = error
                raise
            self._connected[recipient.name] = recipient.incarnation
        self.taking.add(number)

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        number = self.engines[recipient.name]
        try:
            if (why := self.failed.get(number)) is not None:
                raise ReceiverLost(
                    f"engine {recipient.name} cannot be reached with bucket {bucket}: {why}",
                    code="direct.unreached",
                    about=recipient.name,
                )
            await recipient.perform("receive", epoch, packed, bucket)
        except BaseException:
            # Its memory may be gone, or still be written to: it has to offer another.
            self.taking.discard(number)
            self._connected.pop(recipient.name, None)
            raise


class DirectSource:
    """The trainers, each of whose ranks sends its own part."""

    def __init__(self, delivery: DirectDelivery):
        self.delivery, self._buckets = delivery, PlannedBuckets(delivery.plan)

    async def begin(self, manifest: Manifest) -> None:
        """Nothing to prepare: weights are packed as they are."""

    async def forms(self) -> list[dict[str, str]]:
        return self._buckets.forms()

    async def bucket_count(self) -> int:
        return self.delivery.plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        """Every rank packs its part and sends it. The bucket is on its way when this returns, and nowhere in memory."""
        delivery = self.delivery
        if delivery.broken is not None:
            raise delivery.broken
        sent = await delivery.senders.send_direct(bucket, delivery.transfer, sorted(delivery.taking))
        for rank, (_, failed) in enumerate(sent):
            for number, why in failed.items():
                delivery.failed.setdefault(number, f"trainer rank {rank}: {why}")
        return describe_copies(
            self._buckets.form(bucket),
            [share for share, _ in sent],
            engines=len(delivery.engines),
            transfer=delivery.transfer,
            bucket=bucket,
        )

    async def release(self, bucket: int | None = None) -> None:
        """Nothing: a slot of the ring is taken back when another bucket needs it."""
