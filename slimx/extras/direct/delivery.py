"""Weights that every trainer rank writes straight to every engine, over NIXL: the driver's side, which sees no weight.

    DirectSource.gather(b)     every rank packs its part of bucket b, and begins to write it to all engines
    DirectDelivery.bring(b)    an engine waits for what the ranks write, makes the bucket of it, and stages it

Bucket b + 1 is packed and on its way while b is proven. Which rank writes what to whom was dealt out once
(`slimx.extras.direct.dealing`). An engine that is lost gets nothing more; the others do not notice. A rank of which
several engines get nothing is at fault itself: no engine is lost for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from slimx.cluster.waiting import has_died
from slimx.errors import PartLost, SlimxError
from slimx.extras.direct.dealing import copies_of, deal, only
from slimx.extras.direct.ends.copies import describe_copies
from slimx.extras.direct.ends.offer import NO_BASE, Offer
from slimx.extras.direct.ends.receiver import Invitation
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, ReceiverLost, Recipient, TransportLost
from slimx.reshard.plan.copy_plan import Plan
from slimx.runtime.tasks import race

if TYPE_CHECKING:
    from slimx.engines.transport import Trainers
    from slimx.extras.direct.ends.copies import SentBucket

PATIENCE = 0.8
"""Share of a step's deadline in which a bucket must have come: what is missing is told before the step is late."""
MEETING = -1
"""In place of a bucket's number: trainer ranks get to know the memory of engines."""
UNREACHED = ("direct.metadata", "direct.meeting", "direct.missing", "direct.unreached")
"""Codes of what may be the fault of an engine, of a trainer rank, or of the link between them."""
INQUIRY = (1 - PATIENCE) / 4
"""Share of a step's deadline for one look at whose fault a failure is; there are two."""


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
        await self.trainers.call("direct.connect", what, per_rank=each, engine=engine)

    async def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        """Have every rank pack its part of a bucket and begin to write it to `engines`, each with the transfer whose
        bytes of it the engine holds (`slimx.extras.direct.ends.sender.Sender.send`)."""
        arguments = {"bucket": bucket, "transfer": transfer, "engines": engines}
        return await self.trainers.call("direct.send", f"the packing of bucket {bucket} (publish)", **arguments)


@dataclass(slots=True)
class Fate:
    """The outcome of one bucket, or of the meeting before all buckets, at engines, by their numbers."""

    awaited: set[int] = field(default_factory=set)
    """Engines of which nobody knows it yet."""
    reached: bool = False
    """True once trainer ranks have reached one of them."""
    lacking: dict[int, str] = field(default_factory=dict)
    """By engine that was not reached the trainer rank which it lacks something of."""
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when none is awaited any more."""

    def settle(self, engine: int) -> None:
        self.awaited.discard(engine)
        if not self.awaited:
            self.known.set()

    @property
    def culprits(self) -> str:
        """The trainer ranks of which several engines lack something that none has; "": an engine may be at fault."""
        return ", ".join(sorted(set(self.lacking.values()))) if len(self.lacking) > 1 and not self.reached else ""


def receivers_of(machines: Mapping[str, int], ranks: int | None) -> dict[str, list[int | None]]:
    """The receivers of engines over so many `machines`: on each one for the host's memory, or, where each of `ranks`
    targets of an engine has a GPU (1: all ranks take the same), one for each GPU that takes anything."""
    return {
        name: (list(range(max(1, ranks // count))) if ranks is not None else [None]) * count
        for name, count in machines.items()
    }


class DirectDelivery(Delivery):
    """Direct transfers to the engines of a run, as the publisher sees them from the engines' end."""

    def __init__(
        self,
        senders: RankSenders,
        engines: Mapping[str, Sequence[int | None]],
        *,
        step_deadline_s: float,
        changes: tuple[int, int] | None = None,
    ):
        """`engines`: by name the receivers of each, to all of which trainer ranks write, as many on each of its
        machines: for each the GPU, as that machine's process counts them, in whose memory it takes them, None for host
        memory. `step_deadline_s`: seconds for one call to one engine. `changes`: None for whole weights each time, else
        as in `slimx.config.sections.publish.Publish.changes`."""
        self.senders, self.step_deadline_s = senders, step_deadline_s
        self.item, self.every_full = changes or (0, 1)
        self.engines = {name: number for number, name in enumerate(engines)}
        ends = np.cumsum([0, *map(len, engines.values())]).tolist()
        self._receivers = [range(first, end) for first, end in pairwise(ends)]
        """By engine the numbers of its receivers, which are counted through all engines."""
        self._gpus = [gpu for gpus in engines.values() for gpu in gpus]
        self.on_gpus = any(gpu is not None for gpu in self._gpus)
        self._deal()
        self.transfer = 0
        """Number of the publication under way, or of the last one."""
        self.taking: dict[int, list[int]] = {}
        """By receiver of an engine that takes part in it, for each bucket the transfer whose bytes it attests to hold
        (0: none)."""
        self.failed: dict[int, tuple[str, str]] = {}
        """By receiver of an engine the trainer rank that could not write to it, and why."""
        self.broken: SlimxError | None = None
        """Why the trainers cannot send any more."""
        self._connected: dict[str, int] = {}
        """By engine the incarnation whose memory the trainer ranks know."""
        self._prepared = False
        self._owners: list[Any] = []
        """The ranks that pack the present publication."""
        self._replaced = asyncio.Event()
        """Set when other ranks have taken their place."""
        self._fates: dict[int, Fate] = {}
        """By bucket of the present publication."""
        self._mute = ""
        """Trainer ranks that reached no engine in the publication before."""

    def _deal(self) -> None:
        """Deal out what the present ranks send."""
        plan, counts = self.senders.published, list(map(len, self._receivers))
        # Every engine rank has memory of its own.
        self.buckets, (self.copies, self.edges) = PlannedBuckets(plan, apart=True), copies_of(plan, counts)
        self.dealt = deal(plan, engines=self.copies)

    @property
    def plan(self) -> Plan:
        """The plan for one engine."""
        return self.buckets.plan

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        if self.broken is not None:
            raise self.broken
        self._owners, self._replaced = list(self.senders.actors), asyncio.Event()
        if not self._prepared:
            await self.senders.prepare(self.dealt, self.edges, self.item, self.on_gpus)
            self._prepared = True
        self.transfer += 1
        self.taking, self.failed, self._fates, self.wire = {}, {}, {}, 0

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        number = self.engines[recipient.name]
        receivers = self._receivers[number]
        bases = [[NO_BASE] * self.plan.count] * len(receivers)
        if self._connected.get(recipient.name) == recipient.incarnation:
            if (self.transfer - 1) % self.every_full:
                attested = await recipient.perform("transport", epoch, "bases")
                bases = _bases(recipient.name, attested, len(receivers), self.plan.count)
        else:
            self._connected.pop(recipient.name, None)
            name = f"engine {recipient.name} (start {recipient.incarnation}, transfer {self.transfer})"
            invitations = [
                Invitation(
                    name if len(receivers) == 1 else f"{name}, receiver {at}",
                    tuple(only(self.dealt, target).to_bytes() for target in range(*self.edges[each : each + 2])),
                    PATIENCE * self.step_deadline_s,
                    self.item,
                    self._gpus[each],
                )
                for at, each in enumerate(receivers)
            ]
            async with self._judged(MEETING, number):
                offers: list[Offer] = await recipient.perform("transport", epoch, "join", invitations)
                async with self._owned():
                    for each, offer in zip(receivers, offers, strict=True):
                        await self._meet(recipient.name, each, offer)
            self._connected[recipient.name] = recipient.incarnation
        self.taking.update(zip(receivers, bases, strict=True))

    async def _meet(self, name: str, receiver: int, offer: Offer) -> None:
        patience = PATIENCE * self.step_deadline_s
        try:
            async with asyncio.timeout(patience):
                await self.senders.connect(receiver, offer)
        except TimeoutError:
            raise SlimxError(
                f"trainer ranks have not reached engine {name} within {patience:.0f} s",
                code="direct.meeting",
                about="trainer ranks",
            ) from None

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        number = self.engines[recipient.name]
        async with self._judged(bucket, number):
            try:
                for each in self._receivers[number]:
                    if each not in self.failed:
                        continue
                    rank, why = self.failed[each]
                    raise ReceiverLost(
                        f"engine {recipient.name} cannot be reached by {rank} with bucket {bucket}: {why}",
                        code="direct.unreached",
                        about=rank,
                    )
                async with self._owned():
                    await self._unless_replaced(recipient.perform("receive", epoch, packed, bucket))
            except BaseException:
                # Its memory may be gone, or still be written to: it has to offer another.
                for each in self._receivers[number]:
                    self.taking.pop(each, None)
                self._connected.pop(recipient.name, None)
                raise
        if bucket == self.plan.count - 1:
            self._mute = ""

    @asynccontextmanager
    async def _judged(self, what: int, number: int) -> AsyncIterator[None]:
        """Raise TransportLost where trainer ranks, not engine `number`, keep bucket `what`, or the MEETING, from it.

        What several engines lack and none has is the ranks' fault, or their links'. The publication can be tried once
        more; after the same again these ranks are taken for lost.
        """
        fate = self._fates.setdefault(what, Fate())
        fate.awaited.add(number)
        try:
            yield
        except BaseException as error:
            if lacks := isinstance(error, SlimxError) and error.code in UNREACHED:
                fate.lacking[number] = error.about
            fate.settle(number)
            if lacks:
                await self._unless_mute(fate, what, error)
            raise
        fate.reached = True
        fate.settle(number)

    async def _unless_mute(self, fate: Fate, what: int, error: SlimxError) -> None:
        await asyncio.sleep(0)  # calls to several engines begin together
        # What is late is late for all at once; but trainer ranks meet one engine after the other.
        share = PATIENCE - 2 * INQUIRY if what == MEETING else INQUIRY
        with suppress(TimeoutError):
            async with asyncio.timeout(share * self.step_deadline_s):
                await fate.known.wait()
        if not (ranks := fate.culprits):
            return
        which = "at all" if what == MEETING else f"with bucket {what}"
        told = f"{ranks} reached none of {len(fate.lacking)} engines {which}: {error}"
        if self._mute and self.broken is None and not self._replaced.is_set():
            self.broken = PartLost(
                f"{told}; nor did {self._mute} in the publication before", code="direct.mute", about=ranks
            )
        raise TransportLost(told, code="direct.sender", about=ranks) from error

    @asynccontextmanager
    async def _owned(self) -> AsyncIterator[None]:
        """No engine is to blame for what it does not get of ranks that have died: TransportLost is raised then, and the
        next publication tells of them."""
        try:
            yield
        except TransportLost:
            raise
        except SlimxError as error:
            if not await has_died(*self._owners, within=INQUIRY * self.step_deadline_s):
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
        took, _ = await race(receiving, self._replaced.wait())
        if took is None:
            raise TransportLost(
                "trainer ranks were replaced before a bucket of theirs had come",
                code="publish.source",
                about="trainers",
            )
        took.result()

    async def end(self) -> None:
        self._mute = next((fate.culprits for fate in self._fates.values() if fate.culprits), self._mute)

    def renew(self) -> None:
        self._prepared, self.broken, self._mute = False, None, ""
        self._deal()  # there may be fewer
        self._connected.clear()
        self._replaced.set()


class DirectSource:
    """The trainers, each of whose ranks sends its own part."""

    def __init__(self, delivery: DirectDelivery):
        self.delivery = delivery

    async def begin(self, manifest: Manifest) -> None:
        """Nothing to prepare: weights are packed as they are."""

    async def forms(self) -> list[dict[str, str]]:
        return self.delivery.buckets.forms()

    async def bucket_count(self) -> int:
        return self.delivery.plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        """Every rank packs its part and sends it. The bucket is on its way when this returns, and nowhere in memory."""
        delivery = self.delivery
        if delivery.broken is not None:
            raise delivery.broken
        taking = {number: bases[bucket] for number, bases in sorted(delivery.taking.items())}
        sent = await delivery.senders.send(bucket, delivery.transfer, taking)
        for rank, own in enumerate(sent):
            delivery.wire += own.nbytes
            for number, why in own.failed.items():
                delivery.failed.setdefault(number, (f"trainer rank {rank}", why))
        return describe_copies(
            delivery.buckets.form(bucket),
            [own.share for own in sent],
            engines=delivery.copies,
            transfer=delivery.transfer,
            bucket=bucket,
        )

    async def release(self, bucket: int | None = None) -> None:
        """Nothing: a slot of the ring is taken back when another bucket needs it."""


def _bases(engine: str, attested: object, receivers: int, buckets: int) -> list[list[int]]:
    """Check an answer to `bases`: a transfer for each receiver and bucket. Raises SlimxError for anything else."""
    if (
        isinstance(attested, list)
        and len(attested) == receivers
        and all(isinstance(each, list) and len(each) == buckets for each in attested)
        and all(type(base) is int for each in attested for base in each)
    ):
        return attested
    raise SlimxError(
        f"engine {engine} does not say of which transfer it holds each of {buckets} buckets; run the same slimx on "
        "every machine",
        code="direct.bases",
        about=engine,
    )
