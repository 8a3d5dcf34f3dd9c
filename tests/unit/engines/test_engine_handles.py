"""The driver's handle of an engine: a lost or silent actor is a loss, and late answers are dropped."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimx.cluster.waiting import ActorDied
from slimx.engines.fleet.handle import EngineHandle, MemberState, kernels_of
from slimx.engines.server import server as engine_server
from slimx.engines.server.spec import EngineSpec
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.parties import ReceiverLost
from tests.refusals import refused
from tests.virtual_time import run_virtually


class FakeActor:
    """An actor whose answers the test gives: `answers[method]` is a future."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future] = {}

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*arguments: object) -> asyncio.Future:
            self.answers[method] = asyncio.get_running_loop().create_future()
            return self.answers[method]

        return SimpleNamespace(remote=remote)


async def started(deadline_s: float = 5) -> tuple[EngineHandle, FakeActor]:
    actor = FakeActor()
    handle = EngineHandle(EngineSpec("e0", "m", "float32", "cpu"), lambda: actor, Path("e0.log"), deadline_s)
    start = asyncio.create_task(handle.start(5))
    while "start" not in actor.answers:
        await asyncio.sleep(0)
    actor.answers["start"].set_result((replace(handle.spec, port=1), []))
    await start
    return handle, actor


def test_kernels_are_reported_as_the_first_rank_attests_them():
    ranks = [{"epoch": 0, "backends": {"moe_runner_backend": "triton", "deterministic": False}}, {"epoch": 0}]
    assert kernels_of(ranks) == "moe_runner_backend triton, deterministic False"
    assert kernels_of([]) == kernels_of([{"epoch": 0}]) == ""


async def test_calls_to_a_lost_engine_fail_and_late_responses_are_dropped():
    handle, actor = await started()
    assert handle.state is MemberState.JOINING and handle.incarnation == 1
    waiting = asyncio.create_task(handle.perform("load", 3))
    while "perform" not in actor.answers:
        await asyncio.sleep(0)
    reason = "it does not generate"
    handle.lose(SlimxError(reason))
    with refused("engine.lost", about="e0", kind=ReceiverLost) as caught:
        await asyncio.wait_for(waiting, 60)
    assert str(caught.value) == reason
    if not actor.answers["perform"].done():
        actor.answers["perform"].set_result("late")
    with refused("engine.lost", about="e0", kind=ReceiverLost) as caught:
        await handle.perform("verify", 3)
    assert str(caught.value) == reason


@pytest.mark.parametrize("error", [ActorDied("its actor died"), DeadlineError("load", 5, "engine e0")])
async def test_a_dead_actor_and_a_missed_deadline_are_losses(error):
    handle, actor = await started()
    waiting = asyncio.create_task(handle.perform("load", 3))
    while "perform" not in actor.answers:
        await asyncio.sleep(0)
    actor.answers["perform"].set_exception(_Failed(error))
    with refused("engine.silent", about="e0", kind=ReceiverLost) as caught:
        await waiting
    assert str(caught.value) == str(error)


def test_a_silent_actor_is_killed_without_waiting_for_its_stop(monkeypatch):
    killed: list[object] = []

    async def kill(actors: list[object]) -> None:
        killed.extend(actors)

    async def stopped() -> float:
        handle, actor = await started()
        await handle.stop(grace_s=0)
        assert handle.actor is None and killed == [actor]
        return asyncio.get_running_loop().time()

    monkeypatch.setattr("slimx.engines.fleet.handle.kill", kill)
    assert run_virtually(stopped()) == engine_server.ANSWER_S


def test_an_engine_that_is_being_stopped_may_be_stopped_again(monkeypatch):
    """A start that is cancelled and the end of the run stop the same engine."""
    killed: list[object] = []

    async def kill(actors: list[object]) -> None:
        killed.extend(actors)

    async def stopped() -> None:
        handle, actor = await started()
        first = asyncio.create_task(handle.stop(grace_s=0, keep_actor=False))
        await asyncio.sleep(1)
        await handle.stop(grace_s=0)
        await first
        assert handle.actor is None and killed == [actor, actor]

    monkeypatch.setattr("slimx.engines.fleet.handle.kill", kill)
    run_virtually(stopped())


async def test_an_engine_whose_start_failed_gets_another_actor(monkeypatch):
    """The actor still responds, but its process cannot start a server, for example without file descriptors."""
    killed: list[object] = []

    async def kill(actors: list[object]) -> None:
        killed.extend(actors)

    class Exhausted:
        def __getattr__(self, method: str) -> SimpleNamespace:
            def remote(*arguments: object) -> asyncio.Future:
                answer = asyncio.get_running_loop().create_future()
                if method == "start":
                    answer.set_exception(_Failed(SlimxError("too many open files", code="start.failed")))
                else:
                    answer.set_result(None)
                return answer

            return SimpleNamespace(remote=remote)

    monkeypatch.setattr("slimx.engines.fleet.handle.kill", kill)
    actors = [Exhausted(), Exhausted()]
    handle = EngineHandle(EngineSpec("e0", "m", "float32", "cpu"), iter(actors).__next__, Path("e0.log"), 5)
    for attempt in (1, 2):
        with refused("start.failed"):
            await handle.start(5)
        assert handle.actor is None and killed == actors[:attempt]


class _Failed(Exception):
    """As Ray hands on what an actor raised."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


async def test_an_engine_whose_actor_is_gone_is_lost_to_later_calls():
    """Quarantined between two calls and never started again: the publication goes on with the others."""
    handle = EngineHandle(EngineSpec("e0", "m", "float32", "cpu"), SimpleNamespace, Path("e0.log"), 5)
    handle.actor = None
    for verb in ("pause", "begin", "inventory", "abort"):
        with refused("engine.not_running", about="e0", kind=ReceiverLost):
            await handle.perform(verb, 1)
    handle.lose(SlimxError("it hung"))
    with refused("engine.lost", about="e0", kind=ReceiverLost) as caught:
        await handle.perform("load", 1)
    assert await handle.ended() == str(caught.value) == "it hung"
