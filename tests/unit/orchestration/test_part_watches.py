"""Trainers and processes of Ray's that die or hang are found soon, and named alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from slimx.cluster.waiting import ask_ray
from slimx.cluster.watch import has_ended, watch_ray
from slimx.errors import LOST, PartLost, SlimxError
from slimx.orchestration.lifetime import lifetime
from slimx.orchestration.ranks import watch as rank_watch
from slimx.orchestration.ranks.watch import local_pids, watch_ranks
from slimx.runtime.ports import machine
from tests.virtual_time import virtually

HANG_S, ANSWER_S = 60, 2.0
"""Seconds: of a part that does not answer, and in which one that does must, on a loaded machine too."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(rank_watch, "PING_S", 0.01)


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    """A process that a test may kill or stop."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


async def answer() -> None: ...


class Group:
    """Ranks whose pings do what a test says; by default they answer."""

    def __init__(self, **pings: Callable[[], Awaitable[Any]]):
        self.sizes, self.calling = SimpleNamespace(world=3), None
        self.started = [{"pid": 0, "machine": "another"} for _ in range(3)]
        self.logs = [Path(f"trainer-{rank}.log") for rank in range(3)]
        self.calls = [0, 0, 0]
        self.actors = [self._actor(rank, pings.get(f"rank{rank}", answer)) for rank in range(3)]

    def _actor(self, rank: int, ping: Callable[[], Awaitable[Any]]) -> SimpleNamespace:
        def call() -> Awaitable[Any]:
            self.calls[rank] += 1
            return ping()

        return SimpleNamespace(ping=SimpleNamespace(remote=call))

    def holder(self, rank: int) -> str:
        return f"trainer rank {rank}"


async def found(group: Any, deadline_s: float = 0.2) -> SlimxError:
    async with asyncio.timeout(HANG_S):
        return await watch_ranks(group, deadline_s)


@virtually
async def test_a_rank_that_dies_between_two_calls_is_named_with_its_log():
    async def dies() -> None:
        raise ray.exceptions.ActorDiedError

    error = await found(Group(rank1=dies))
    assert (error.code, error.about, error.status) == ("actor.died", "trainer rank 1", LOST)
    assert "trainer-1.log" in str(error)


@virtually
async def test_a_rank_that_stands_still_between_two_calls_is_named_alone():
    error = await found(Group(rank2=asyncio.Future))
    assert (error.code, error.about, error.status) == ("rank.silent", "trainer rank 2", LOST)


@virtually
async def test_a_rank_that_is_busy_with_a_call_is_not_taken_for_silent():
    group = Group(rank0=asyncio.Future)
    group.calling = "step 3 of training"
    watch = asyncio.ensure_future(watch_ranks(group, 0.1))
    await asyncio.sleep(0.5)
    assert not watch.done() and group.calls[0] == 1 and group.calls[1] > 1
    group.calling = None
    assert (await asyncio.wait_for(watch, HANG_S)).about == "trainer rank 0"


async def test_a_stopped_process_is_named_during_a_collective_call(process):
    group = Group()
    group.calling = "step 3 of training"
    group.started[1] = {"pid": process.pid, "machine": machine()}
    assert local_pids(group) == {1: process.pid}
    process.suspend()
    error = await found(group)
    assert (error.code, error.about) == ("rank.silent", "trainer rank 1") and str(process.pid) in str(error)


async def test_a_process_that_is_stopped_for_a_moment_is_not_named(process):
    group = Group()
    group.started[1] = {"pid": process.pid, "machine": machine()}
    watch = asyncio.ensure_future(watch_ranks(group, HANG_S))
    for _ in range(3):
        process.suspend()
        await asyncio.sleep(0.1)
        process.resume()
        await asyncio.sleep(0.1)
    assert not watch.done()
    watch.cancel()


@virtually
async def test_a_save_error_is_reported_by_its_rank():
    error = SlimxError("no room", code="checkpoint.write", about="d")

    async def fails() -> None:
        raise ray.exceptions.RayTaskError("ping", "", error)

    assert (await found(Group(rank0=fails))).code == "checkpoint.write"


# Ray's own processes --------------------------------------------------------------------------------------------------


async def lost(processes: dict[str, psutil.Process], probes: dict[str, Callable[[], object]]) -> PartLost:
    async with asyncio.timeout(HANG_S):
        return await watch_ray(processes, probes, ANSWER_S, look_s=0.01)


async def test_a_process_of_rays_that_has_ended_is_named(process):
    assert has_ended({"GCS": process}) is None
    process.kill()
    error = await lost({"GCS": process}, {"raylet": lambda: None})
    assert (error.code, error.about, error.status) == ("ray.lost", "GCS", LOST)
    assert has_ended({"GCS": process}).about == "GCS"


@pytest.mark.parametrize("silent", ["raylet", "GCS"])
async def test_an_unresponsive_ray_service_is_named_and_blocks_nothing(silent):
    probes = {name: (lambda: time.sleep(HANG_S)) if name == silent else (lambda: None) for name in ("raylet", "GCS")}
    error = await lost({}, probes)
    assert (error.code, error.about) == ("ray.lost", silent)


async def test_a_part_of_ray_that_answers_with_an_error_is_named():
    def broken() -> None:
        raise ray.exceptions.RaySystemError("broken pipe")

    assert (await lost({}, {"raylet": broken})).about == "raylet"


async def test_a_blocking_call_into_ray_leaves_the_event_loop_free():
    began, beats = time.monotonic(), 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    beating = asyncio.ensure_future(beat())
    with pytest.raises(SlimxError) as error:
        await ask_ray("room for a batch", "Ray's raylet", 0.5, time.sleep, HANG_S)
    beating.cancel()
    assert error.value.code == "deadline" and error.value.holder == "Ray's raylet"
    assert beats > 1 and time.monotonic() - began < HANG_S
    assert await ask_ray("an answer", "Ray's raylet", HANG_S, lambda value: value, 3) == 3


async def test_an_error_of_ray_in_a_call_is_a_lost_part():
    def broken() -> None:
        raise ray.exceptions.RaySystemError("broken pipe")

    with pytest.raises(PartLost) as error:
        await ask_ray("room for a batch", "Ray's raylet", HANG_S, broken)
    assert (error.value.code, error.value.about) == ("ray.lost", "Ray's raylet")


@pytest.mark.parametrize(("dead", "about"), [(True, "raylet"), (False, "trainer rank 0")])
def test_rays_end_is_named_whichever_process_is_missed_first(monkeypatch, process, dead, about):
    async def work(alarm: Any) -> None:
        if dead:
            process.kill()
            process.wait(HANG_S)
        raise KeyError("in Ray's words") if dead else PartLost("gone", about="trainer rank 0")

    for name, stand in (("start_ray", None), ("stop_ray", None), ("watch_over_this_process", None)):
        monkeypatch.setattr(lifetime, name, lambda *_, result=stand, **__: result)
    monkeypatch.setattr(lifetime, "local_processes", lambda: {"raylet": process})
    monkeypatch.setattr(lifetime, "probes", dict)
    cluster, checkpoint = SimpleNamespace(stop_deadline=HANG_S, ray_deadline=HANG_S), SimpleNamespace(grace=None)
    deadlines = SimpleNamespace(rollout_deadline=HANG_S, step_deadline=HANG_S, watch_deadline=HANG_S)
    config = SimpleNamespace(
        cluster=cluster, checkpoint=checkpoint, rollout=deadlines, schedule=deadlines, trainer=deadlines
    )
    with pytest.raises(PartLost) as error:
        lifetime.run_with_ray(config, "cpu", work)
    assert error.value.about == about
