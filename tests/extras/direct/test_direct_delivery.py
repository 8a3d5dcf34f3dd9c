"""Engines get what has changed since the transfer that they attest to hold, and whole weights where they hold none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from slimx.cluster import waiting
from slimx.errors import PartLost, SlimxError
from slimx.extras.direct.delivery import DirectDelivery, receivers_of
from slimx.extras.direct.ends.agent import LinkError
from slimx.extras.direct.ends.offer import Offer
from slimx.extras.direct.ends.receiver import Invitation
from slimx.extras.direct.ends.sent_bucket import SentBucket
from slimx.extras.direct.source import DirectSource
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import Sizes
from slimx.layout.table import checkpoint_parts
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.packer import Contribution
from slimx.reshard.parties import LocalRecipient, TransportLost
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from tests.refusals import refused
from tests.unit.reshard.gather_stand import MODEL, SIZES, WORLD, plan

EVERY_FULL = 4


def hf_plan() -> Plan:
    """Returns the plan of tensors with Hugging Face names."""
    return compile_plan(
        MegatronLayout(MODEL.table, SIZES).parts(),
        checkpoint_parts(MODEL.table),
        precision=Precision("float32", "bfloat16"),
        bucket_bytes=10**6,
    )


class Rank:
    """A trainer rank as far as it is asked whether it lives."""

    def __init__(self) -> None:
        self.lives = True
        self.ping = SimpleNamespace(remote=self._ping)

    async def _ping(self) -> None:
        if not self.lives:
            raise ray.exceptions.RayActorError


class Senders:
    """Trainer ranks that note what they are asked to send."""

    def __init__(self, plan: Plan, copies: int):
        self.published = plan
        self.tensors = sum(len(target[0].tensors) for target in plan.buckets) * copies
        self.item, self.edges, self.on_gpus = -1, [], False
        self.met: list[int] = []
        """Numbers of what they got to know the memory of."""
        self.sent: list[dict[int, int]] = []
        self.actors = [Rank() for _ in range(WORLD)]
        self.fails: SlimxError | None = None
        self.fails_to: dict[int, dict[int, str]] = {}
        """By rank the engines that it cannot write to, and why."""
        self.unmet: dict[int, SlimxError] = {}
        """Errors of the meeting with engines."""

    async def prepare(self, dealt: Plan, edges: list[int], item: int, on_gpus: bool) -> None:
        assert dealt.targets == edges[-1]
        self.item, self.edges, self.on_gpus = item, edges, on_gpus

    async def connect(self, engine: int, offer: Offer) -> None:
        self.met.append(engine)
        if self.fails is not None:
            raise self.fails
        if engine in self.unmet:
            raise self.unmet[engine]

    async def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        self.sent.append(engines)
        share = Contribution(np.zeros(self.tensors, np.uint64), np.zeros(self.tensors, np.uint32))
        return [SentBucket(share, self.fails_to.get(rank, {}), 100) for rank in range(WORLD)]


class Engine(LocalRecipient):
    def __init__(self, name: str, machines: int):
        self.name, self.requests, self.report, self.machines = name, 0, [0], machines
        self.invited: list[int] = []
        self.parts: list[int] = []
        self.gpus: list[int | None] = []
        """By invitation the ranks whose bytes it brings, and the GPU that takes them."""
        self.waits = False
        self.fails: SlimxError | None = None

    async def transport(self, method: str, *arguments: Any) -> Any:
        return await getattr(self, method)(*arguments)

    async def join(self, invitations: list[Invitation]) -> list[Offer]:
        self.invited += [invitation.item for invitation in invitations]
        self.parts += [len(invitation.parts) for invitation in invitations]
        self.gpus += [invitation.gpu for invitation in invitations]
        return [Offer(invitation.name, b"", (), ()) for invitation in invitations]

    async def receive(self, packed: object, bucket: int) -> None:
        if self.waits:
            await asyncio.sleep(60)
        if self.fails is not None:
            raise self.fails

    async def bases(self) -> object:
        self.requests += 1
        return [self.report] * self.machines


class Stand:
    def __init__(self, every_full: int | None, machines: tuple[int, int] = (1, 1), *, hf: bool = False):
        """Starts delivery to engines of `machines` machines each. `hf`: with one target for all ranks of an engine."""
        self.plan = hf_plan() if hf else plan(10**6)
        assert self.plan.count == 1 and self.plan.targets == (1 if hf else 2)
        self.engines = [Engine(f"e{number}", count) for number, count in enumerate(machines)]
        self.senders = Senders(self.plan, sum(machines) if hf else len(machines))
        self.delivery = DirectDelivery(
            self.senders,
            {engine.name: [None] * engine.machines for engine in self.engines},
            step_deadline_s=300,
            changes=None if every_full is None else (2, every_full),
        )

    async def publish(self, *engines: int) -> dict[int, int]:
        """Publishes to `engines`; returns by engine the base that the trainer ranks get."""
        await self.delivery.begin(Manifest(policy="p", version=1, trainer_step=1, membership_epoch=1), 1)
        for number in engines:
            await self.delivery.connect(self.engines[number], 1)
        await DirectSource(self.delivery).gather(0)
        assert self.delivery.wire == 100 * WORLD
        for number in engines:
            self.engines[number].report = [self.delivery.transfer]
        return self.senders.sent[-1]


async def test_engines_get_changes_relative_to_the_state_they_report() -> None:
    stand = Stand(EVERY_FULL)
    bases = [await stand.publish(0, 1) for _ in range(6)]
    assert bases == [{0: base, 1: base} for base in (0, 1, 2, 3, 0, 5)]
    assert stand.senders.item == 2 and stand.engines[0].invited == [2]


@pytest.mark.parametrize("every_full", [2, 3, 4])
async def test_engines_that_take_turns_get_full_weights_equally_often(every_full: int) -> None:
    """For example engines that sample and evaluation engines, to which the same weights are published apart."""
    stand = Stand(every_full)
    bases = [await stand.publish(number % 2) for number in range(4 * every_full)]
    for engine in (0, 1):
        full = [base[engine] == 0 for base in bases[engine::2]]
        assert full == [number % every_full == 0 for number in range(2 * every_full)]


async def test_an_engine_that_missed_one_or_was_started_again_says_so_itself() -> None:
    stand = Stand(EVERY_FULL)
    await stand.publish(0, 1)
    assert await stand.publish(0) == {0: 1}
    assert await stand.publish(0, 1) == {0: 2, 1: 1}  # no rank keeps transfer 1: whole runs (reshard/test_direct_delta)
    stand = Stand(EVERY_FULL)
    await stand.publish(0, 1)
    stand.engines[1].incarnation = 2
    assert await stand.publish(0, 1) == {0: 1, 1: 0}
    assert stand.engines[1].invited == [2, 2] and stand.engines[1].requests == 0


async def test_without_the_key_nothing_is_requested_and_runs_are_complete() -> None:
    stand = Stand(None)
    assert [await stand.publish(0, 1) for _ in range(3)] == [{0: 0, 1: 0}] * 3
    assert stand.engines[0].requests == 0 and stand.senders.item == 0 and stand.engines[0].invited == [0]


@pytest.mark.parametrize("answer", [None, [], [1, 2], ["1"], [1.0]], ids=str)
async def test_a_report_that_omits_a_bucket_is_refused(answer: object) -> None:
    stand = Stand(EVERY_FULL)
    await stand.publish(0)
    stand.engines[0].report = answer
    with refused("direct.bases", about="e0"):
        await stand.publish(0)


async def test_new_ranks_meet_all_engines_again_and_send_them_everything() -> None:
    stand = Stand(EVERY_FULL)
    await stand.publish(0, 1)
    stand.senders.item = -1
    stand.delivery.renew()
    assert await stand.publish(0, 1) == {0: 0, 1: 0} and stand.senders.item == 2
    assert stand.engines[0].invited == [2, 2] and stand.engines[0].requests == 0


@pytest.mark.parametrize("lives", [True, False])
async def test_buckets_missing_from_dead_ranks_blame_no_engine(lives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "DEATH_S", 0.1)
    stand = Stand(EVERY_FULL)
    stand.senders.fails = SlimxError("a rank does not answer", code="rank.silent", about="trainer rank 1")
    stand.senders.actors[0].lives = lives
    code, kind = ("rank.silent", SlimxError) if lives else ("publish.source", TransportLost)
    with refused(code, kind=kind):
        await stand.publish(0)
    stand.senders.fails = None
    if not lives:  # as long as nobody replaces them, nothing is tried again
        with refused("rank.silent", about="trainer rank 1"):
            await stand.publish(0)
        stand.delivery.renew()
    assert await stand.publish(0) == {0: 0}


async def test_nobody_waits_for_a_bucket_of_ranks_that_were_replaced() -> None:
    stand = Stand(None)
    await stand.publish(0)
    stand.engines[0].waits = True
    bringing = asyncio.create_task(stand.delivery.bring(stand.engines[0], 1, None, 0))
    await asyncio.sleep(0)
    stand.delivery.renew()
    async with asyncio.timeout(30):
        with refused("publish.source", about="trainers", kind=TransportLost):
            await bringing


def lacking(rank: int) -> LinkError:
    return LinkError("bytes have not come", code="direct.missing", about=f"trainer rank {rank}")


async def brought(stand: Stand) -> list[object]:
    """Returns the outcome of bucket 0 at each engine."""
    packed = await DirectSource(stand.delivery).gather(0)
    calls = [stand.delivery.bring(engine, 1, packed, 0) for engine in stand.engines]
    return await asyncio.gather(*calls, return_exceptions=True)


async def begun(*fails: SlimxError | None) -> Stand:
    """Starts a publication to engines that fail like this when bucket 0 is delivered to them."""
    stand = Stand(None)
    await stand.publish(0, 1)
    for engine, error in zip(stand.engines, fails, strict=True):
        engine.fails = error
    return stand


@pytest.mark.parametrize("unreached", [False, True])
async def test_a_rank_that_reaches_no_engine_is_lost_the_second_time(
    unreached: bool,
) -> None:
    stand = await begun(*([None, None] if unreached else [lacking(1), lacking(1)]))
    for attempt in range(2):
        if unreached:
            stand.senders.fails_to = {1: {0: "the link broke", 1: "the link broke"}}
        errors = await brought(stand)
        assert {type(error) for error in errors} == {TransportLost}
        assert {(error.code, error.about) for error in errors} == {("direct.sender", "trainer rank 1")}
        await stand.delivery.end()
        if attempt == 0:
            await stand.publish(0, 1)
    with refused("direct.mute", about="trainer rank 1", kind=PartLost):
        await stand.publish(0)
    stand.delivery.renew()
    stand.senders.fails_to = {}
    assert await stand.publish(0) == {0: 0}


async def test_a_rank_that_reached_them_in_between_gets_another_try() -> None:
    stand = await begun(lacking(1), lacking(1))
    for _ in range(2):
        assert all(isinstance(error, TransportLost) for error in await brought(stand))
        await stand.delivery.end()
        for engine in stand.engines:
            engine.fails, fault = None, engine.fails
        await stand.publish(0, 1)
        assert await brought(stand) == [None, None]
        await stand.delivery.end()
        for engine in stand.engines:
            engine.fails = fault
        await stand.publish(0, 1)


@pytest.mark.parametrize("other", [None, SlimxError("a wrong byte", code="peer.checksum")], ids=str)
async def test_a_fault_of_one_engine_is_attributed_to_it(other: SlimxError | None) -> None:
    stand = await begun(lacking(1), other)
    errors = await brought(stand)
    assert errors == [stand.engines[0].fails, other]


async def test_an_engine_that_no_rank_reaches_is_lost_alone() -> None:
    stand = Stand(None)
    unmet = LinkError("no route", code="direct.metadata", about="trainer rank 0")
    for fails, codes in (({0, 1}, ["direct.sender"] * 2), ({1}, [None, "direct.metadata"])):
        stand.senders.unmet = dict.fromkeys(fails, unmet)
        await stand.delivery.begin(Manifest(policy="p", version=1, trainer_step=1, membership_epoch=1), 1)
        met = await asyncio.gather(*(stand.delivery.connect(e, 1) for e in stand.engines), return_exceptions=True)
        assert [getattr(error, "code", None) for error in met] == codes
        await stand.delivery.end()


async def test_an_engine_is_lost_with_any_of_its_machines() -> None:
    stand = Stand(EVERY_FULL, machines=(2, 2))
    assert await stand.publish(0, 1) == dict.fromkeys(range(4), 0)
    assert stand.senders.edges == [0, 1, 2, 3, 4] and sorted(stand.senders.met) == [0, 1, 2, 3]
    assert await stand.publish(1) == {2: 1, 3: 1}
    stand.senders.fails_to = {0: {3: "the link broke"}}
    assert await stand.publish(0, 1) == {0: 1, 1: 1, 2: 2, 3: 2}
    ours, theirs = await brought(stand)
    assert ours is None and (theirs.code, theirs.about) == ("direct.unreached", "trainer rank 0")
    await DirectSource(stand.delivery).gather(0)
    assert stand.senders.sent[-1] == {0: 1, 1: 1}, "neither of its machines gets anything more"


async def test_every_machine_of_an_engine_gets_all_hugging_face_tensors() -> None:
    """Engines over other numbers of machines take such a plan: no layout fits them all."""
    stand = Stand(EVERY_FULL, machines=(2, 1), hf=True)
    assert await stand.publish(0, 1) == dict.fromkeys(range(3), 0)
    assert stand.senders.edges == [0, 1, 2, 3] and sorted(stand.senders.met) == [0, 1, 2]
    assert [engine.parts for engine in stand.engines] == [[1, 1], [1]]
    assert await stand.publish(1) == {2: 1}


async def test_a_smaller_world_deals_a_new_plan() -> None:
    stand = Stand(None)
    await stand.publish(0, 1)
    assert set(stand.delivery.dealt.moved["source"].tolist()) == set(range(WORLD))
    stand.senders.actors.pop()
    stand.senders.published = plan(10**6, Sizes(data=WORLD - 1))
    stand.delivery.renew()
    await stand.publish(0, 1)
    assert set(stand.delivery.dealt.moved["source"].tolist()) == set(range(WORLD - 1))


def test_receivers_are_one_a_machine_or_one_a_gpu_that_takes_anything() -> None:
    machines = {"e0": 1, "e1": 2}
    assert receivers_of(machines, None) == {"e0": [None], "e1": [None, None]}
    assert receivers_of(machines, 4) == {"e0": [0, 1, 2, 3], "e1": [0, 1, 0, 1]}
    assert receivers_of(machines, 1) == {"e0": [0], "e1": [0, 0]}, "the others copy from the first one"


async def test_each_engine_rank_on_a_gpu_is_invited_by_itself() -> None:
    stand = Stand(None)
    stand.delivery = DirectDelivery(stand.senders, receivers_of({"e0": 1, "e1": 1}, 2), step_deadline_s=300)
    assert await stand.publish(0, 1) == dict.fromkeys(range(4), 0)
    assert stand.senders.on_gpus and stand.senders.edges == [0, 1, 2, 3, 4]
    assert [engine.gpus for engine in stand.engines] == [[0, 1]] * 2
    assert [engine.parts for engine in stand.engines] == [[1, 1]] * 2
