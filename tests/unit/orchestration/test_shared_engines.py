"""Engines that several policies publish to take requests once they hold the adapters of all, after a restart too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from slimx.engines.fleet.handle import MemberState
from slimx.errors import SlimxError
from slimx.orchestration.engines.shared import SharedEngines
from slimx.orchestration.publications import EnginePublications
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import ReceiverLost
from tests.refusals import refused
from tests.unit.engines.recovery_stand import FakeEngine, Stand, gone
from tests.unit.reshard.publication_stand import BUCKETS, TENSORS
from tests.unit.rollout.rollout_stand import config_of


class Server(FakeEngine):
    """An engine that takes publications, adapters alone only after a base, and starts only while it may."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.refuses: tuple[str, str, int] | None = None
        """Verb, policy and version of a publication that fails here, once."""
        self.based, self.open = False, None

    async def start(self, deadline_s: float) -> None:
        await self.may_start.wait()
        await super().start(deadline_s)
        self.based = False

    async def perform(self, verb: str, epoch: int, *arguments: Any) -> Any:
        if verb == "begin":
            self.open = arguments[0]
            if self.open.encoding == "adapters" and not self.based:
                raise SlimxError("no base", code="receiver.no_base")
        if self.open is not None and (verb, self.open.policy, self.open.version) == self.refuses:
            self.refuses = None
            raise SlimxError(f"{verb} failed", code="engine.copy")
        if verb == "commit":
            self.based = True
            self.log.append(f"{self.open.policy} {self.open.version} {self.open.encoding} {self.url}")
        return {"inventory": [TENSORS], "verify": {"checked": len(TENSORS)}}.get(verb)


class Trainers:
    """Ranks of `policy` that do, once, what `after` says when its next publication has ended."""

    actors = ()

    def __init__(self, policy: str, after: dict[str, Callable[[], Awaitable[None]]]):
        self.policy, self.after = policy, after
        planned = SimpleNamespace(plan=SimpleNamespace(count=len(BUCKETS)), forms=lambda: [TENSORS])
        self.plans = {"publish": planned, "adapters": planned}

    async def pack(self, name: str, bucket: int) -> PackedBucket:
        return BUCKETS[bucket]

    async def release(self, name: str, bucket: int | None) -> None:
        if bucket is None and (work := self.after.pop(self.policy, None)) is not None:
            await work()


@pytest.fixture
async def run(request: pytest.FixtureRequest) -> AsyncIterator[SimpleNamespace]:
    """A run of two policies and one engine, or as many as the parameter says, whose first versions are out."""
    stand = Stand(count=getattr(request, "param", 1), kind=Server)
    shared, after = SharedEngines(stand.members, ["actor", "judge"]), {}
    engines = SimpleNamespace(members=stand.members)

    def policy(name: str) -> EnginePublications:
        maker, trainers = AsyncMock(versions={}), Trainers(name, after)
        return EnginePublications(name, config_of(), engines, maker, trainers, "hf", stand.notes.append, shared)

    actor, judge = policy("actor"), policy("judge")
    for engine in stand.engines:
        engine.state = MemberState.JOINING

    async def step(number: int) -> list[str]:
        """Publishes both at the same time, as a run does; returns what was done to engines."""
        stand.log.clear()
        async with asyncio.timeout(60):
            await asyncio.gather(*(policy.publish(number) for policy in (actor, judge)))
        return list(stand.log)

    first = await step(0)
    yield SimpleNamespace(stand=stand, actor=actor, judge=judge, after=after, step=step, first=first)
    await stand.members.stop()


def of(name: str, log: list[str]) -> list[str]:
    """Returns the lines of `log` about the engine `name`, of its publications and of the router."""
    lines = [line.replace("http://", "") for line in log if f"http://{name}/" in line]
    return [line for line in lines if not line.startswith("stop")]


async def back(run: SimpleNamespace) -> None:
    await run.stand.until(lambda: run.stand.engines[0].state is MemberState.JOINING)


async def test_each_policy_brings_the_base_once_and_requests_come_after_the_last(run: SimpleNamespace) -> None:
    assert of("e0", run.first) == ["actor 0 hf e0/0", "judge 0 hf e0/0", "add e0/0"]
    assert of("e0", await run.step(1)) == ["actor 1 adapters e0/0", "judge 1 adapters e0/0"]


async def test_a_returning_engine_gets_every_policys_adapters_first(run: SimpleNamespace) -> None:
    await run.step(1)
    await run.stand.members.quarantine(run.stand.engines[0], gone())
    await back(run)
    run.stand.log.clear()
    await run.actor.publish(1)  # by the watch of the engines, which are the actor's
    assert of("e0", run.stand.log) == ["actor 1 hf e0/2", "judge 1 adapters e0/2", "add e0/2"]


async def test_an_engine_lost_between_two_policies_gets_the_first_ones_again(run: SimpleNamespace) -> None:
    run.stand.engines[0].refuses = "load", "judge", 1
    assert of("e0", await run.step(1)) == [
        "actor 1 adapters e0/0",
        "remove e0/0",
        "judge 1 hf e0/2",
        "actor 1 adapters e0/2",
        "add e0/2",
    ]


async def test_an_engine_lost_before_the_last_policys_part_is_reported(run: SimpleNamespace) -> None:
    run.stand.engines[0].state = MemberState.OUT
    run.stand.engines[0].incarnation += 1
    with refused("engine.lost", about="e0", kind=ReceiverLost):
        await run.actor.publisher.members.admit(run.stand.engines[0])


@pytest.mark.parametrize("run", [2], indirect=True)
async def test_an_engine_that_refuses_adapters_is_out_until_it_has_all(
    run: SimpleNamespace,
) -> None:
    """The other one serves on, and holds the new versions of both."""
    first = run.stand.engines[0]
    first.refuses = "load", "judge", 1
    first.may_start.clear()
    log = await run.step(1)
    assert of("e0", log) == ["actor 1 adapters e0/0", "remove e0/0"]
    assert of("e1", log) == ["actor 1 adapters e1/0", "judge 1 adapters e1/0"]
    first.may_start.set()
    await back(run)
    log = await run.step(2)
    assert of("e0", log) == ["actor 2 hf e0/2", "judge 2 adapters e0/2", "add e0/2"]
    assert of("e1", log) == ["actor 2 hf e1/0", "judge 2 adapters e1/0"]


@pytest.mark.parametrize("run", [2], indirect=True)
async def test_an_engine_that_dies_between_policies_waits_for_the_next_step(
    run: SimpleNamespace,
) -> None:
    first = run.stand.engines[0]
    first.may_start.clear()
    run.after["actor"] = lambda: run.stand.members.quarantine(first, gone())
    log = await run.step(1)
    assert of("e0", log) == ["actor 1 adapters e0/0", "remove e0/0"]
    assert of("e1", log) == ["actor 1 adapters e1/0", "judge 1 adapters e1/0"]
    first.may_start.set()
    await back(run)
    assert of("e0", await run.step(2)) == ["actor 2 hf e0/2", "judge 2 adapters e0/2", "add e0/2"]


@pytest.mark.parametrize("run", [2], indirect=True)
@pytest.mark.parametrize("before", [["actor"], ["actor", "judge"]], ids=["between", "after"])
async def test_an_engine_that_returns_early_gets_all_policies_of_the_step(
    run: SimpleNamespace, before: list[str]
) -> None:
    """It died after the publications of `before`."""
    first = run.stand.engines[0]

    async def dies() -> None:
        await run.stand.members.quarantine(first, gone())
        await back(run)

    run.after[before[-1]] = dies
    log = await run.step(1)
    again = ["actor 1 hf", "judge 1 adapters"]
    early = [f"{policy} 1 adapters" for policy in before]
    assert of("e0", log) == [
        *(f"{publication} e0/0" for publication in early),
        "remove e0/0",
        *(f"{publication} e0/2" for publication in again),
        "add e0/2",
    ]
    assert of("e1", log) == [f"{publication} e1/0" for publication in early + again]


@pytest.mark.parametrize("policy", ["actor", "judge"])
async def test_the_policy_whose_engines_they_are_watches_them_for_all(run: SimpleNamespace, policy: str) -> None:
    """An engine that came back while nothing was published: the watch of one policy brings what all need."""
    publications = getattr(run, policy)
    await run.stand.members.quarantine(run.stand.engines[0], gone())
    await back(run)
    run.stand.log.clear()

    async def work() -> None:
        if policy == "actor":
            await run.stand.until(lambda: bool(run.stand.members.members()))
        await asyncio.sleep(0.02)

    await publications.watched(work(), 0)
    watched = ["actor 0 hf e0/2", "judge 0 adapters e0/2", "add e0/2"]
    assert of("e0", run.stand.log) == (watched if policy == "actor" else [])
