"""Engines that several policies publish to take requests once they hold the adapters of all, after a restart too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.engines.fleet.handle import Standing
from slimx.orchestration.publications import Publications
from slimx.orchestration.shared_engines import SharedEngines
from slimx.reshard.parties import NoReceiverLeft, ReceiverLost
from tests.refusals import refused


class Fleet:
    """A membership of engines, of which a test loses one and starts it again."""

    def __init__(self, count: int = 1) -> None:
        self.all = [SimpleNamespace(name=f"e{n}", incarnation=1, standing=Standing.JOINING) for n in range(count)]
        self.engine = self.all[0]
        """The one that is lost."""
        self.epoch = 0
        self.engines = SimpleNamespace(members=self)

    def candidates(self) -> list[Any]:
        return self.all

    def standings(self) -> list[str]:
        return [str(engine.standing) for engine in self.all]

    async def available(self) -> None: ...

    async def admit(self, engine: Any) -> None:
        engine.standing = Standing.MEMBER

    def restart(self) -> None:
        self.engine.incarnation += 1
        self.engine.standing = Standing.JOINING


class Noted:
    """A publisher that notes what it was asked for, and by the way loses the engine where it is told to."""

    def __init__(self, run: Policy, kind: str):
        self.run, self.kind = run, kind

    async def publish(self, version: int, *, trainer_step: int) -> SimpleNamespace:
        run, fleet = self.run, self.run.fleet
        run.sent.append((run.policy, version, self.kind))
        await asyncio.sleep(0)  # where another policy's could begin
        if (run.policy, version) in run.losing:
            run.losing.remove((run.policy, version))
            fleet.restart()
            raise NoReceiverLeft("lost", code="publish.lost", about="e0")
        for engine in fleet.all:
            await run.members.admit(engine)
        run.served.append((run.policy, version, *fleet.standings()))
        engines = dict.fromkeys(engine.name for engine in fleet.all)
        return SimpleNamespace(engines=engines, lost=[], manifest=SimpleNamespace(version=version))


class Policy(Publications):
    """Only what orders publications."""

    def __init__(self, policy: str, fleet: Fleet, shared: SharedEngines, sent: list[Any], served: list[Any]):
        self.policy, self.fleet, self.sent, self.served = policy, fleet, sent, served
        self.losing: list[tuple[str, int]] = []
        self.engines, self._shared, self._based = fleet.engines, shared, shared.based
        self.config = SimpleNamespace(schedule=SimpleNamespace(colocate=False))
        self._maker, self._note = SimpleNamespace(versions={}), sent.append
        self.members = shared.enter(policy, self._deliver)
        self.publisher, self.adapters, self._brought = Noted(self, "all"), Noted(self, "adapters"), False


@pytest.fixture
def run(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A run of two policies and one engine, or as many as the parameter says."""
    fleet = Fleet(getattr(request, "param", 1))
    shared, sent, served = SharedEngines(fleet, ["actor", "judge"]), [], []
    actor, judge = (Policy(name, fleet, shared, sent, served) for name in ("actor", "judge"))

    async def step(number: int) -> None:
        """Publish both at the same time, as a run does; what was sent."""
        sent.clear(), served.clear()
        await asyncio.gather(*(policy._publish(number) for policy in (actor, judge)))

    return SimpleNamespace(fleet=fleet, actor=actor, judge=judge, sent=sent, served=served, step=step)


async def test_each_policy_brings_the_base_once_and_requests_come_after_the_last(run: SimpleNamespace) -> None:
    await run.step(0)
    assert run.sent == [("actor", 0, "all"), ("judge", 0, "all")]
    assert run.served == [("actor", 0, "joining"), ("judge", 0, "member")]
    await run.step(1)
    assert run.sent == [("actor", 1, "adapters"), ("judge", 1, "adapters")]


async def test_an_engine_that_comes_back_gets_every_policys_adapters_before_requests(run: SimpleNamespace) -> None:
    await run.step(0)
    await run.step(1)
    run.fleet.restart()
    run.sent.clear(), run.served.clear()
    await run.actor._publish(1)  # by the watch of the engines, which are the actor's
    assert run.sent == [("actor", 1, "all"), ("judge", 1, "adapters")]
    assert run.served == [("actor", 1, "joining"), ("judge", 1, "member")]


async def test_an_engine_that_is_lost_between_two_policies_gets_the_first_ones_again(run: SimpleNamespace) -> None:
    await run.step(0)
    run.judge.losing = [("judge", 1)]
    await run.step(1)
    assert [each for each in run.sent if isinstance(each, tuple)] == [
        ("actor", 1, "adapters"),
        ("judge", 1, "adapters"),
        ("judge", 1, "all"),
        ("actor", 1, "adapters"),
    ]
    assert run.served[-1] == ("actor", 1, "member") and run.served[-2] == ("judge", 1, "joining")


async def test_an_engine_that_was_lost_before_the_last_policys_part_is_told_as_lost(run: SimpleNamespace) -> None:
    run.fleet.engine.standing = Standing.OUT
    with refused("engine.lost", about="e0", kind=ReceiverLost):
        await run.actor.members.admit(run.fleet.engine)


@pytest.mark.parametrize("run", [2], indirect=True)
async def test_one_of_several_engines_that_comes_back_serves_after_the_last_policys_part(run: SimpleNamespace) -> None:
    await run.step(0)
    run.fleet.restart()
    await run.step(1)
    assert run.sent == [("actor", 1, "all"), ("judge", 1, "adapters")]
    assert run.served == [("actor", 1, "joining", "member"), ("judge", 1, "member", "member")]
