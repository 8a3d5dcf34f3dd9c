"""Weights that every trainer rank writes straight to every engine, over NIXL: the driver's side, which sees no weight.

    DirectSource.gather(b)     every rank packs its part of bucket b, and begins to write it to all engines
    DirectDelivery.bring(b)    an engine waits for what the ranks write, makes the bucket of it, and stages it

Bucket b + 1 is packed and on its way while b is proven. Which rank writes what to whom was dealt out once
(`slimx.reshard.plan.dealing`). An engine that is lost gets nothing more; the others do not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from slimx.cluster.waiting import has_died
from slimx.errors import SlimxError
from slimx.reshard.direct.copies import SentBucket, describe_copies
from slimx.reshard.direct.offer import NO_BASE, Offer
from slimx.reshard.direct.receiver import Invitation
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, ReceiverLost, Recipient, TransportLost
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.dealing import deal, only
from slimx.runtime.tasks import cancelled

PATIENCE = 0.8
"""Share of a step's deadline in which a bucket must have come: what is missing is told before the step is late."""


class Senders(Protocol):
    """The trainer ranks."""

    actors: list[Any]
    """Those of the present ranks."""

    async def prepare_direct(self, dealt: Plan, ranks: int, item: int) -> None: ...

    async def connect_direct(self, engine: int, offer: Offer) -> None: ...

    async def send_direct(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]: ...


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
        every_full: int | None = None,
    ):
        """`plan`: for one engine. `engines`: names of all. `ranks`: of the trainer, which send through `links`
        (`slimx.reshard.plan.dealing.deal`). `step_deadline_s`: seconds for one call to one engine. `every_full`: None
        for whole weights each time, else changes travel, and each so many publications whole weights."""
        self.senders, self.plan, self.step_deadline_s, self.every_full = senders, plan, step_deadline_s, every_full
        self.item = item_of(plan) if every_full is not None else 0
        self.dealt = deal(plan, ranks=ranks, engines=len(engines), links=links)
        self.engines = {name: number for number, name in enumerate(engines)}
        self.transfer = 0
        """Number of the publication under way, or of the last one."""
        self.taking: dict[int, list[int]] = {}
        """By engine that takes part in it, for each bucket the transfer whose bytes it attests to hold (0: none)."""
        self.failed: dict[int, str] = {}
        """By engine why a trainer rank could not write to it."""
        self.broken: SlimxError | None = None
        """Why the trainers cannot send any more."""
        self._connected: dict[str, int] = {}
        """By engine the incarnation whose memory the trainer ranks know."""
        self._prepared = False
        self._owners: list[Any] = []
        """The ranks that pack the present publication."""
        self._replaced = asyncio.Event()
        """Set when other ranks have taken their place."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        if self.broken is not None:
            raise self.broken
        self._owners, self._replaced = list(self.senders.actors), asyncio.Event()
        if not self._prepared:
            await self.senders.prepare_direct(self.dealt, self.plan.targets, self.item)
            self._prepared = True
        self.transfer += 1
        self.taking, self.failed, self.wire = {}, {}, 0

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        number = self.engines[recipient.name]
        bases = [NO_BASE] * self.plan.count
        if self._connected.get(recipient.name) == recipient.incarnation:
            if self.every_full is not None and (self.transfer - 1) % self.every_full:
                bases = _bases(recipient.name, await recipient.perform("bases", epoch), self.plan.count)
        else:
            self._connected.pop(recipient.name, None)
            first = number * self.plan.targets
            parts = tuple(only(self.dealt, first + rank).to_bytes() for rank in range(self.plan.targets))
            name = f"engine {recipient.name} (start {recipient.incarnation}, transfer {self.transfer})"
            invitation = Invitation(name, parts, PATIENCE * self.step_deadline_s, self.item)
            offer: Offer = await recipient.perform("join", epoch, invitation)
            async with self._owned():
                await self.senders.connect_direct(number, offer)
            self._connected[recipient.name] = recipient.incarnation
        self.taking[number] = bases

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        number = self.engines[recipient.name]
        try:
            if (why := self.failed.get(number)) is not None:
                raise ReceiverLost(
                    f"engine {recipient.name} cannot be reached with bucket {bucket}: {why}",
                    code="direct.unreached",
                    about=recipient.name,
                )
            async with self._owned():
                await self._unless_replaced(recipient.perform("receive", epoch, packed, bucket))
        except BaseException:
            # Its memory may be gone, or still be written to: it has to offer another.
            self.taking.pop(number, None)
            self._connected.pop(recipient.name, None)
            raise

    @asynccontextmanager
    async def _owned(self) -> AsyncIterator[None]:
        """No engine is to blame for what it does not get of ranks that have died: TransportLost is raised then, and the
        next publication tells of them."""
        try:
            yield
        except TransportLost:
            raise
        except SlimxError as error:
            if not await has_died(*self._owners):
                raise
            if not self._replaced.is_set():
                self.broken = error
            raise TransportLost(
                f"a trainer rank died before its share of a bucket had come: {error}",
                code="publish.source",
                about="trainers",
            ) from error

    async def _unless_replaced(self, receiving: Awaitable[Any]) -> None:
        """Wait for an engine that takes a bucket, but no longer than the ranks that write it last."""
        took, replaced = asyncio.ensure_future(receiving), asyncio.ensure_future(self._replaced.wait())
        try:
            await asyncio.wait({took, replaced}, return_when=asyncio.FIRST_COMPLETED)
            if not took.done():
                raise TransportLost(
                    "trainer ranks were replaced before a bucket of theirs had come",
                    code="publish.source",
                    about="trainers",
                )
            took.result()
        finally:
            await cancelled(took, replaced)

    def renew(self) -> None:
        self._prepared, self.broken = False, None
        self._connected.clear()
        self._replaced.set()


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
        taking = {number: bases[bucket] for number, bases in sorted(delivery.taking.items())}
        sent = await delivery.senders.send_direct(bucket, delivery.transfer, taking)
        for rank, own in enumerate(sent):
            delivery.wire += own.nbytes
            for number, why in own.failed.items():
                delivery.failed.setdefault(number, f"trainer rank {rank}: {why}")
        return describe_copies(
            self._buckets.form(bucket),
            [own.share for own in sent],
            engines=len(delivery.engines),
            transfer=delivery.transfer,
            bucket=bucket,
        )

    async def release(self, bucket: int | None = None) -> None:
        """Nothing: a slot of the ring is taken back when another bucket needs it."""


def item_of(plan: Plan) -> int:
    """Bytes of the elements among which changes are looked for: most of what `plan` brings is fp8 codes, or bf16."""
    return 2 if plan.precision.quantisation is None else 1


def _bases(engine: str, attested: object, buckets: int) -> list[int]:
    """Check an answer to `bases`: a transfer for each bucket. Raises SlimxError for anything else."""
    if isinstance(attested, list) and len(attested) == buckets and all(type(base) is int for base in attested):
        return attested
    raise SlimxError(
        f"engine {engine} does not say of which transfer it holds each of {buckets} buckets; run the same slimx on "
        "every machine",
        code="direct.bases",
        about=engine,
    )
