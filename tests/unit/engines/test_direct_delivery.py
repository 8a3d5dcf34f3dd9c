"""Engines get what has changed since the transfer that they attest to hold, and whole weights where they hold none."""

from __future__ import annotations

import numpy as np
import pytest

from slimx.engines.delivery.direct import DirectDelivery, DirectSource
from slimx.reshard.direct.copies import SentBucket
from slimx.reshard.direct.offer import Offer
from slimx.reshard.direct.receiver import Invitation
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.packer import Share
from slimx.reshard.parties import LocalRecipient
from slimx.reshard.plan.copy_plan import Plan
from tests.refusals import refused
from tests.unit.reshard.gather_stand import WORLD, plan

EVERY_FULL = 4


class Senders:
    """Trainer ranks that note what they are asked to send."""

    def __init__(self, plan: Plan, engines: int):
        self.tensors = sum(len(target[0].tensors) for target in plan.buckets) * engines
        self.item = -1
        self.sent: list[dict[int, int]] = []

    async def prepare_direct(self, dealt: Plan, ranks: int, item: int) -> None:
        self.item = item

    async def connect_direct(self, engine: int, offer: Offer) -> None: ...

    async def send_direct(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        self.sent.append(engines)
        share = Share(np.zeros(self.tensors, np.uint64), np.zeros(self.tensors, np.uint32))
        return [SentBucket(share, {}, 100) for _ in range(WORLD)]


class Engine(LocalRecipient):
    def __init__(self, name: str):
        self.name, self.asked, self.held = name, 0, [0]
        self.invited: list[int] = []

    async def join(self, invitation: Invitation) -> Offer:
        self.invited.append(invitation.item)
        return Offer(invitation.name, b"", (), ())

    async def bases(self) -> object:
        self.asked += 1
        return self.held


class Stand:
    def __init__(self, every_full: int | None):
        self.plan = plan(10**6)
        assert self.plan.count == 1
        self.engines = [Engine("e0"), Engine("e1")]
        self.senders = Senders(self.plan, len(self.engines))
        self.delivery = DirectDelivery(
            self.senders, self.plan, ["e0", "e1"], ranks=WORLD, step_deadline_s=10, every_full=every_full
        )

    async def publish(self, *engines: int) -> dict[int, int]:
        """By engine the base that the trainer ranks are told of."""
        await self.delivery.begin(Manifest(policy="p", version=1, trainer_step=1, membership_epoch=1), 1)
        for number in engines:
            await self.delivery.connect(self.engines[number], 1)
        await DirectSource(self.delivery).gather(0)
        assert self.delivery.wire == 100 * WORLD
        for number in engines:
            self.engines[number].held = [self.delivery.transfer]
        return self.senders.sent[-1]


async def test_engines_get_changes_of_what_they_attest_and_each_so_often_whole_weights() -> None:
    stand = Stand(EVERY_FULL)
    told = [await stand.publish(0, 1) for _ in range(6)]
    assert told == [{0: base, 1: base} for base in (0, 1, 2, 3, 0, 5)]
    assert stand.senders.item == 2 and stand.engines[0].invited == [2]


async def test_an_engine_that_missed_one_or_was_started_again_says_so_itself() -> None:
    stand = Stand(EVERY_FULL)
    await stand.publish(0, 1)
    assert await stand.publish(0) == {0: 1}
    assert await stand.publish(0, 1) == {0: 2, 1: 1}  # no rank keeps transfer 1: whole runs (reshard/test_direct_delta)
    stand = Stand(EVERY_FULL)
    await stand.publish(0, 1)
    stand.engines[1].incarnation = 2
    assert await stand.publish(0, 1) == {0: 1, 1: 0}
    assert stand.engines[1].invited == [2, 2] and stand.engines[1].asked == 0


async def test_without_the_key_nothing_is_asked_and_runs_are_whole() -> None:
    stand = Stand(None)
    assert [await stand.publish(0, 1) for _ in range(3)] == [{0: 0, 1: 0}] * 3
    assert stand.engines[0].asked == 0 and stand.senders.item == 0 and stand.engines[0].invited == [0]


@pytest.mark.parametrize("answer", [None, [], [1, 2], ["1"], [1.0]], ids=str)
async def test_what_says_nothing_of_each_bucket_is_refused(answer: object) -> None:
    stand = Stand(EVERY_FULL)
    await stand.publish(0)
    stand.engines[0].held = answer
    with refused("direct.bases", about="e0"):
        await stand.publish(0)
