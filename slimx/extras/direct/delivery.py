"""Driver's side of direct transfers, in which every trainer rank writes to every engine over NIXL.

    DirectSource.gather(b)     every rank packs its part of bucket b, and starts writing it to all engines
    DirectDelivery.bring(b)    an engine waits for the ranks' bytes, assembles the bucket, and stages it

Bucket b + 1 is packed and sent while b is verified. `slimx.extras.direct.dealing` assigns the bytes to ranks once. A
lost engine receives nothing more, which does not affect the others. If bytes of a rank are missing at several engines,
the rank or its link is considered the cause, and no engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from slimx.cluster.waiting import has_died
from slimx.errors import PartLost, SlimxError
from slimx.extras.direct.dealing import only, spread_of
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
    from slimx.extras.direct.ends.sent_bucket import SentBucket

PATIENCE = 0.8
"""Fraction of a step's deadline within which a bucket must arrive; the rest is for finding the cause if it does not."""
CONNECTING = -1
"""Value used in place of a bucket's index while trainer ranks connect to engines."""
UNREACHED = ("direct.metadata", "direct.connect", "direct.missing", "direct.unreached")
"""Error codes of failures that can be caused by an engine, by a trainer rank, or by the link between them."""
INQUIRY = (1 - PATIENCE) / 4
"""Fraction of a step's deadline that each of the two checks for the cause of a failure may take."""


class RankSenders:
    """Calls that the delivery makes to all trainer ranks of a run."""

    def __init__(self, trainers: Trainers):
        self.trainers = trainers

    @property
    def actors(self) -> list[Any]:
        return self.trainers.actors

    @property
    def published(self) -> Plan:
        """Plan that the current trainer ranks follow to send weights to one engine."""
        return self.trainers.plans["publish"].plan

    async def prepare(self, dealt: Plan, edges: list[int], item: int, on_gpus: bool) -> None:
        """Sends all ranks the plan `dealt`, in which `slimx.extras.direct.dealing` has chosen the senders.

        `edges[i]`: first target of receiver i. `item`: element size in bytes for deltas, or 0 for full weights.
        `on_gpus`: True if bytes are sent from GPU memory."""
        (stored,) = await self.trainers.stored([dealt.to_bytes()])
        what = "the preparation of direct transfers"
        await self.trainers.call("direct.prepare", what, plan=stored, edges=edges, item=item, on_gpu=on_gpus)

    async def connect(self, engine: int, offer: Offer) -> None:
        """Connects every rank to the memory that receiver `engine` offers."""
        offers = [(offer.of(rank).to_bytes(),) for rank in range(len(self.actors))]
        name = f"the connection to engine {offer.engine}"
        await self.trainers.call("direct.connect", name, per_rank=offers, engine=engine)

    async def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        """Makes every rank pack its part of a bucket and start writing it, and returns each rank's result. `engines`:
        receiver -> index of the transfer whose bytes it has (`slimx.extras.direct.ends.sender.DirectSender.send`)."""
        name = f"the packing of bucket {bucket} (publish)"
        return await self.trainers.call("direct.send", name, bucket=bucket, transfer=transfer, engines=engines)


@dataclass(slots=True)
class DeliveryOutcome:
    """Outcome of delivering one bucket to all engines, or of connecting to them. Engines are identified by index."""

    awaited: set[int] = field(default_factory=set)
    """Engines whose outcome is not known yet."""
    reached: bool = False
    """True once the bytes of all trainer ranks have reached at least one engine."""
    lacking: dict[int, str] = field(default_factory=dict)
    """Engine at which bytes are missing -> the trainer rank that should have sent these bytes."""
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set once the outcome at every engine is known."""

    def settle(self, engine: int) -> None:
        self.awaited.discard(engine)
        if not self.awaited:
            self.known.set()

    @property
    def culprits(self) -> str:
        """Names of trainer ranks whose bytes reached none of several engines; "" if an engine may be the cause."""
        if len(self.lacking) < 2 or self.reached:
            return ""
        return ", ".join(sorted(set(self.lacking.values())))


def receivers_of(machines: Mapping[str, int], ranks: int | None) -> dict[str, list[int | None]]:
    """Returns each engine's receivers: a GPU's index for one in GPU memory, None for one in host memory. `machines`:
    engine -> number of its machines. `ranks`: None gives each machine one receiver in host memory; else the number of
    targets of an engine, which are divided among its receivers, one per GPU (1: all ranks load the same bytes)."""
    receivers: dict[str, list[int | None]] = {}
    for name, count in machines.items():
        per_machine: list[int | None] = [None]
        if ranks is not None:
            per_machine = [*range(max(1, ranks // count))]
        receivers[name] = per_machine * count
    return receivers


class DirectDelivery(Delivery):
    """Delivery of buckets that trainer ranks write directly into the engines' memory."""

    def __init__(
        self,
        senders: RankSenders,
        engines: Mapping[str, Sequence[int | None]],
        *,
        step_deadline_s: float,
        changes: tuple[int, int] | None = None,
        staggered: bool = False,
    ):
        """Prepares transfers to `engines`.

        `engines`: name -> receivers of the engine, equally many on each of its machines; trainer ranks write to all of
        them. A receiver is identified by the index of its GPU in the process on that machine, or by None for host
        memory. `step_deadline_s`: seconds for one call to one engine. `changes`: None to send full weights each time,
        else the size in bytes of the elements that are compared, and the interval of an engine's full publications.
        `staggered`: as in `spread_of`."""
        self.senders = senders
        self.step_deadline_s = step_deadline_s
        self.item, self.every_full = changes or (0, 1)
        self.engines = {name: index for index, name in enumerate(engines)}
        ends = np.cumsum([0, *map(len, engines.values())]).tolist()
        self._receivers = [range(first, end) for first, end in pairwise(ends)]
        """Engine -> indices of its receivers; receivers are numbered over all engines."""
        self._gpus = list(chain.from_iterable(engines.values()))
        self.staggered = staggered
        self.on_gpus = any(gpu is not None for gpu in self._gpus)
        self._deal()
        self.described: dict[int, dict[int, PackedBucket]] = {}
        """Bucket of the current publication -> its description for each turn."""
        self.sums: dict[int, np.ndarray] = {}
        """Bucket of the plan -> sums of its tensors in the current publication."""
        self.transfer = 0
        """Index of the current or most recent transfer."""
        self.taking: dict[int, list[int]] = {}
        """Receiver of a participating engine -> for each bucket the transfer whose bytes the receiver has (0: none)."""
        self.failed: dict[int, tuple[str, str]] = {}
        """Receiver -> a trainer rank that could not write to this receiver, and the reason."""
        self.broken: SlimxError | None = None
        """Error that prevents the trainers from sending; None if they can send."""
        self._connected: dict[str, tuple[int, int]] = {}
        """Engine -> its incarnation (number of starts) when trainer ranks connected to its memory, and the number of
        transfers to it since then."""
        self._prepared = False
        self._owners: list[Any] = []
        """Ray actors of the trainer ranks that pack the current publication."""
        self._replaced = asyncio.Event()
        """Event that is set when other trainer ranks have replaced those in `_owners`."""
        self._outcomes: dict[int, DeliveryOutcome] = {}
        """Bucket of the current publication -> outcome of its delivery; CONNECTING -> outcome of the connections."""
        self._culprits = ""
        """Names of trainer ranks whose bytes reached no engine in the previous publication; "" if none."""

    def _deal(self) -> None:
        """Chooses which of the current trainer ranks sends each tensor part that engines receive."""
        plan = self.senders.published
        self.buckets = PlannedBuckets(plan, apart=True)  # every engine rank has its own memory
        self.spread = spread_of(plan, [len(receivers) for receivers in self._receivers], staggered=self.staggered)
        self.edges = self.spread.edges
        self.dealt = self.spread.deal(plan)

    @property
    def plan(self) -> Plan:
        """Plan that trainer ranks follow to send weights to one engine."""
        return self.buckets.plan

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        if self.broken is not None:
            raise self.broken
        self._owners = list(self.senders.actors)
        self._replaced = asyncio.Event()
        if not self._prepared:
            await self.senders.prepare(self.dealt, self.edges, self.item, self.on_gpus)
            self._prepared = True
        self.transfer += 1
        self.taking = {}
        self.failed = {}
        self._outcomes = {}
        self.described = {}
        self.sums = {}
        self.wire = 0

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        index = self.engines[recipient.name]
        receivers = self._receivers[index]
        bases = [[NO_BASE] * self.plan.count] * len(receivers)
        incarnation, received = self._connected.get(recipient.name, (None, 0))
        if incarnation == recipient.incarnation:
            if received % self.every_full:
                attested = await recipient.perform("transport", epoch, "bases")
                bases = _bases(recipient.name, attested, len(receivers), self.plan.count)
        else:
            self._connected.pop(recipient.name, None)
            name = f"engine {recipient.name} (start {recipient.incarnation}, transfer {self.transfer})"
            invitations = []
            for number, receiver in enumerate(receivers):
                agent = name if len(receivers) == 1 else f"{name}, receiver {number}"
                invitations.append(self._invitation(agent, receiver))
            async with self._judged(CONNECTING, index):
                offers: list[Offer] = await recipient.perform("transport", epoch, "join", invitations)
                async with self._unless_died(recipient.name):
                    for receiver, offer in zip(receivers, offers, strict=True):
                        await self._meet(recipient.name, receiver, offer)
            received = 0
        self._connected[recipient.name] = recipient.incarnation, received + 1
        self.taking.update(zip(receivers, bases, strict=True))

    def _invitation(self, name: str, receiver: int) -> Invitation:
        first, end = self.edges[receiver : receiver + 2]
        plans = tuple(only(self.dealt, target).to_bytes() for target in range(first, end))
        return Invitation(name, plans, PATIENCE * self.step_deadline_s, self.item, self._gpus[receiver])

    async def _meet(self, name: str, receiver: int, offer: Offer) -> None:
        patience = PATIENCE * self.step_deadline_s
        try:
            async with asyncio.timeout(patience):
                await self.senders.connect(receiver, offer)
        except TimeoutError:
            raise SlimxError(
                f"trainer ranks could not connect to engine {name} within {patience:.0f} s; set cluster.network to a "
                "network that connects the machines of trainers and engines",
                code="direct.connect",
                about="trainer ranks",
            ) from None

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        index = self.engines[recipient.name]
        packed = self._description(index, bucket)
        async with self._judged(bucket, index):
            try:
                for receiver in self._receivers[index]:
                    if receiver not in self.failed:
                        continue
                    rank, reason = self.failed[receiver]
                    raise ReceiverLost(
                        f"{rank} could not write bucket {bucket} to engine {recipient.name} ({reason}); publish again",
                        code="direct.unreached",
                        about=rank,
                    )
                async with self._unless_died(recipient.name):
                    await self._unless_replaced(recipient.name, recipient.perform("receive", epoch, packed, bucket))
            except BaseException:
                # The engine's memory may be released or still be written to, so it must offer new memory.
                for receiver in self._receivers[index]:
                    self.taking.pop(receiver, None)
                self._connected.pop(recipient.name, None)
                raise
        if bucket == self.plan.count - 1:
            self._culprits = ""

    def _description(self, engine: int, bucket: int) -> PackedBucket:
        """Returns the description of `bucket` as the engine with index `engine` receives it."""
        replica = self.edges[self._receivers[engine][0]] // self.plan.targets
        return self.described[bucket][self.spread.turns[replica]]

    @asynccontextmanager
    async def _judged(self, bucket: int, index: int) -> AsyncIterator[None]:
        """Raises TransportLost if trainer ranks, not engine `index`, prevent the delivery of `bucket`, or the
        connection if `bucket` is CONNECTING. If bytes are missing at several engines and no engine has all of them, the
        ranks or their links are considered the cause. The publication can be repeated once; if that also fails, these
        ranks are considered lost."""
        outcome = self._outcomes.setdefault(bucket, DeliveryOutcome())
        outcome.awaited.add(index)
        try:
            yield
        except BaseException as error:
            if isinstance(error, SlimxError) and error.code in UNREACHED:
                outcome.lacking[index] = error.about
                outcome.settle(index)
                await self._raise_for_culprits(outcome, bucket, error)
            else:
                outcome.settle(index)
            raise
        outcome.reached = True
        outcome.settle(index)

    async def _raise_for_culprits(self, outcome: DeliveryOutcome, bucket: int, error: SlimxError) -> None:
        await asyncio.sleep(0)  # lets the calls to other engines begin
        # A bucket is late at all engines at the same time, but trainer ranks connect to engines one after the other.
        fraction = PATIENCE - 2 * INQUIRY if bucket == CONNECTING else INQUIRY
        with suppress(TimeoutError):
            async with asyncio.timeout(fraction * self.step_deadline_s):
                await outcome.known.wait()
        ranks = outcome.culprits
        if not ranks:
            return
        subject = "connect" if bucket == CONNECTING else f"write bucket {bucket}"
        message = f"{ranks} could not {subject} to any engine ({error})"
        if self._culprits and self.broken is None and not self._replaced.is_set():
            self.broken = PartLost(
                f"{message}; repair the machines or the network of {self._culprits}, which also failed in the previous "
                "publication",
                code="direct.mute",
                about=ranks,
            )
        raise TransportLost(message, code="direct.sender", about=ranks) from error

    @asynccontextmanager
    async def _unless_died(self, engine: str) -> AsyncIterator[None]:
        """Raises TransportLost if the block fails because a trainer rank died, which the next publication reports."""
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
                f"trainer ranks died before all weights arrived at engine {engine} ({error}); find the cause in the "
                "trainers' logs",
                code="publish.source",
                about="trainers",
            ) from error

    async def _unless_replaced(self, engine: str, receiving: Awaitable[Any]) -> None:
        """Waits until an engine has received a bucket. Raises TransportLost if ranks sending it are replaced first."""
        received, _ = await race(receiving, self._replaced.wait())
        if received is None:
            raise TransportLost(
                f"trainer ranks were replaced before their bucket arrived at engine {engine}; publish again",
                code="publish.source",
                about="trainers",
            )
        received.result()

    async def end(self) -> None:
        culprits = [outcome.culprits for outcome in self._outcomes.values() if outcome.culprits]
        self._culprits = next(iter(culprits), self._culprits)

    def renew(self) -> None:
        self._prepared = False
        self.broken = None
        self._culprits = ""
        self._deal()  # there may be fewer ranks
        self._connected.clear()
        self._replaced.set()


def _bases(engine: str, attested: object, receivers: int, buckets: int) -> list[list[int]]:
    """Returns an engine's response to `bases`. Raises SlimxError unless it lists a transfer per receiver and bucket."""
    with suppress(msgspec.ValidationError):
        bases = msgspec.convert(attested, list[list[int]])
        if [len(found) for found in bases] == [buckets] * receivers:
            return bases
    raise SlimxError(
        f"engine {engine} did not report one transfer for each of {buckets} buckets; install the same version of slimx "
        "on every machine",
        code="direct.bases",
        about=engine,
    )
