"""Environments that compute live in processes: what one does ends with its own, and the driver goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimx.data.records import Prompt
from slimx.environments.base import Step
from slimx.environments.processes import Environments
from slimx.errors import DeadlineError, SlimxError
from slimx.extras.agents import multi_turn
from slimx.rollout.hook_loading import load_hooks
from tests.processes import lives, wait_for
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of
from tests.unit.rollout.scripted_engine import PROMPT, ScriptedEngine, context

ROOT = Path(__file__).resolve().parents[3]
WORLD = f"{__name__}.Misbehaving"


def block() -> None:
    """Keeps the thread as a computation without end does, at no cost."""
    while True:
        time.sleep(600)


class Misbehaving:
    """Does what the model says and keeps its event loop: for processes of their own."""

    def __init__(self, *, busy_s: float = 0.0):
        self.busy_s, self.turns = busy_s, 0

    async def reset(self, prompt: Prompt, seed: int) -> str:
        self.prompt, self.seed = prompt.id, seed
        return f"{prompt.id} {os.getpid()}"

    async def step(self, text: str) -> Step:
        self.turns += 1
        if text == "compute for ever":
            block()
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "raise":
            raise ValueError("no such move")
        if text == "start another":
            child = subprocess.Popen(["sleep", "300"])
            Path(self.prompt).write_text(str(child.pid))
            block()
        if text == "start a daemon":
            subprocess.run(["setsid", "-f", "sh", "-c", f"echo $$ > {self.prompt}; exec sleep 300"], check=True)
        time.sleep(self.busy_s)
        info = {"prompt": self.prompt, "turns": self.turns, "pid": os.getpid()}
        return Step(text=text, done=text == "end", info=info if text != "lambda" else {"bad": lambda: 0})

    async def close(self) -> None:
        pass


@pytest.fixture
async def environments() -> AsyncIterator[Environments]:
    environments = Environments()
    yield environments
    environments.close()


def make(environments: Environments, *, processes: int = 2, **options: Any) -> Any:
    return environments.make(WORLD, options, deadline_s=300.0, rollout="g/0", processes=processes)


async def begin(environments: Environments, name: str = "p", step_s: float = 300.0, **options: Any) -> tuple[Any, int]:
    """Returns an environment that has begun, however long that took, and the id of its process. `step_s`: deadline of
    each step."""
    world = make(environments, **options)
    pid = int((await world.reset(Prompt(id=name, token_ids=[1]), 5)).rpartition(" ")[2])
    world._deadline_s = step_s
    return world, pid


async def test_a_failing_environment_fails_only_its_rollout(environments):
    """The others are called by the same two threads, before and after."""
    good, good_pid = await begin(environments)
    assert (await good.step("a")).info == {"prompt": "p", "turns": 1, "pid": good_pid}
    late, late_pid = await begin(environments, step_s=5.0)
    with refused("deadline", kind=DeadlineError) as slow:
        await late.step("compute for ever")
    assert (slow.value.seconds, slow.value.holder) == (5.0, WORLD) and "g/0" in slow.value.awaited
    crashed, _ = await begin(environments)
    with refused("environment.crash", about="g/0") as crash:
        await crashed.step("crash")
    assert "SIGSEGV" in str(crash.value)
    raising, _ = await begin(environments)
    for text, cause in (("raise", "ValueError: no such move"), ("lambda", "<lambda>")):
        with refused("environment.raised", about=WORLD) as caught:
            await raising.step(text)
        assert cause in str(caught.value)
    assert (await good.step("b")).info["turns"] == 2, "its state is where it was"
    for world in (good, late, crashed, raising):
        await world.close()
    assert not lives(good_pid)
    assert not lives(late_pid)


@pytest.mark.parametrize(
    ("signum", "text", "code"),
    [
        (signal.SIGKILL, "a", "environment.crash"),
        (signal.SIGSTOP, "a", "deadline"),
        (signal.SIGSTOP, "x" * 2**20, "deadline"),
    ],
    ids=["killed", "stopped", "stopped, and sent more than a pipe holds"],
)
async def test_a_killed_or_stopped_environment_fails_its_rollout_alone(environments, signum, text, code):
    world, pid = await begin(environments, step_s=5.0 if code == "deadline" else 300.0)
    other, _ = await begin(environments)
    os.kill(pid, signum)
    async with asyncio.timeout(120):
        with pytest.raises(SlimxError) as failed:
            await world.step(text)
    assert failed.value.code == code
    wait_for(lambda: not lives(pid))
    assert (await other.step("b")).info["turns"] == 1


async def test_children_of_a_killed_environment_are_killed(environments, tmp_path):
    world, _ = await begin(environments, str(tmp_path / "pid"), step_s=15.0)
    with pytest.raises(DeadlineError):
        await world.step("start another")
    child = int((tmp_path / "pid").read_text())
    assert not lives(child)


async def test_a_daemon_ends_with_the_environment_that_left_it(environments: Environments, tmp_path: Path) -> None:
    world, _ = await begin(environments, name=str(tmp_path / "pid"))
    await world.step("start a daemon")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    await world.close()
    assert not lives(int((tmp_path / "pid").read_text()))


async def test_a_hundred_environments_share_two_places(environments):
    gaps, last = [], time.monotonic()

    async def beat() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    async def play(number: int) -> list[int]:
        world, pid = await begin(environments, f"p{number}", busy_s=0.01)
        try:
            seen = [await world.step("a") for _ in range(3)]
        finally:
            await world.close()
        assert [step.info["prompt"] for step in seen] == [f"p{number}"] * 3
        assert [step.info["turns"] for step in seen] == [1, 2, 3]
        return [pid, *(step.info["pid"] for step in seen)]

    heart = asyncio.create_task(beat())
    pids = await asyncio.gather(*(play(number) for number in range(100)))
    heart.cancel()
    assert all(len(set(episode)) == 1 for episode in pids), "an environment stays where it is"
    assert len({episode[0] for episode in pids}) == 100
    assert sorted(gaps)[-3] < sum(gaps) / 4, f"the event loop stood still for {max(gaps):.2f} s"


async def test_only_as_many_calls_compute_at_once_as_there_are_places(environments):
    """Four calls of 0.1 s each by one place take four times as long: no two of them run at once."""
    worlds = [(await begin(environments, processes=1, busy_s=0.1))[0] for _ in range(4)]
    began = time.monotonic()
    await asyncio.gather(*(world.step("a") for world in worlds))
    assert time.monotonic() - began >= 4 * 0.1
    # The wait for a place is not the environment's fault: a deadline of one call holds for the computation alone.
    worlds = [(await begin(environments, processes=1, busy_s=1.1, step_s=10.0))[0] for _ in range(10)]
    await asyncio.gather(*(world.step("a") for world in worlds))


async def test_a_cancelled_rollout_ends_its_environment(environments):
    world, pid = await begin(environments)
    task = asyncio.create_task(world.step("compute for ever"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for(lambda: not lives(pid))
    again, _ = await begin(environments)
    assert (await again.step("a")).text == "a"


async def test_the_multi_turn_hook_plays_in_processes(environments):
    engine = ScriptedEngine("1", "end", finish_reason="stop")
    ctx = replace(context(engine), environments=environments)
    options = {"environment": "tests.unit.environments.environment_stand.Counting", "environment_options": {"turns": 2}}
    trajectory = await multi_turn.generate(ctx, PROMPT, environment_processes=2, **options)
    assert trajectory.metadata == {"rewards": [0.5, 0.5], "turns": 2, "ended": "done", "info": {"seen": 2}}


def test_a_number_of_processes_that_is_none_is_refused():
    options = {"environment": "tests.unit.environments.environment_stand.Counting", "environment_processes": -1}
    with refused("environment.option", about="rollout.options.environment_processes"):
        load_hooks(config_of(generate="multi_turn", options=options))


DRIVER = f"""
import asyncio
from slimx.data.records import Prompt
from slimx.environments.processes import Environments

async def main():
    world = Environments().make("{WORLD}", {{}}, deadline_s=60, rollout="g/0", processes=1)
    print((await world.reset(Prompt(id="p", token_ids=[1]), 0)).split()[1], flush=True)
    await world.step("compute for ever")

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_driver_that_is_killed_leaves_no_environment_behind(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py")]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=-1) as driver:
        pid = int(driver.stdout.readline())
        assert lives(pid)
        driver.kill()
    wait_for(lambda: not lives(pid))
