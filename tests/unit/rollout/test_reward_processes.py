"""A reward in a process of its own cannot stop the others: it is killed at its deadline, and replaced when it dies."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from slimx.config.sections.reward import Reward
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout.flow.reward_pool import RewardPool
from slimx.rollout.flow.reward_processes import RewardProcesses, reward_runner
from slimx.rollout.hook_loading import load_reward
from tests.extras.rewards.reward_stand import context, trajectory
from tests.processes import lives, wait_for

HOOK = "tests.extras.rewards.reward_stand.misbehaving"
ROOT = Path(__file__).resolve().parents[3]


def processes(**options: Any) -> RewardProcesses:
    config = Reward(function=HOOK, isolation="process", **{"workers": 2, "deadline": 20, **options})
    runner = reward_runner(config, load_reward(config, {}), "no tokenizer is needed", {})
    assert isinstance(runner, RewardProcesses)
    return runner


async def judge(runner: RewardProcesses, text: str) -> Any:
    try:
        return await runner.judge(context(text), trajectory())
    except SlimxError as error:
        return error


@pytest.fixture
def deadline_s() -> float:
    """Long enough for a worker to load the hook."""
    return 6.0


async def test_calls_that_break_fail_alone_and_the_others_are_judged(deadline_s):
    runner = processes(deadline=deadline_s, options={"worth": 0.5})
    try:
        texts = ["compute for ever", "fine", "crash", "raise", "sleep a little", "nothing", "fine"]
        late, *others = await asyncio.gather(*(judge(runner, text) for text in texts))
        assert isinstance(late, DeadlineError) and "trajectory t" in late.awaited and late.holder == HOOK
        fine, crashed, raised, slow, nothing, last = others
        assert fine == slow == last == (0.5, {})
        assert [(error.code, error.about) for error in (crashed, raised)] == [
            ("reward.crash", HOOK),
            ("reward.raised", HOOK),
        ]
        assert "trajectory t" in str(crashed) and "77" in str(crashed), "what it judged, and the exit status"
        assert "ValueError: no" in str(raised)
        assert (nothing.code, nothing.about) == ("reward.returned", "reward") and HOOK in str(nothing)
        assert runner.killed == 1
        (first, _), (second, _) = await asyncio.gather(judge(runner, "process"), judge(runner, "process"))
        assert os.getpid() not in (first, second), "not in the driver"
    finally:
        runner.close()
    assert not [child for child in psutil.Process().children() if child.pid in (first, second)]


async def test_idle_workers_that_are_stopped_are_replaced(deadline_s):
    config = Reward(function=HOOK, isolation="process", workers=1, deadline=deadline_s, options={"worth": 0.5})
    runner = RewardProcesses(config, load_reward(config, {}), "no tokenizer is needed", {}, take_s=8.0)
    try:
        pid, _ = await judge(runner, "process")
        os.kill(int(pid), signal.SIGSTOP)
        async with asyncio.timeout(20 * deadline_s):
            judged = await asyncio.gather(*(judge(runner, "fine") for _ in range(4)))
        assert judged == [(0.5, {})] * 4
        assert (runner.replaced, runner.killed) == (1, 0)
        assert not psutil.pid_exists(int(pid))
    finally:
        runner.close()


async def test_a_deadline_and_its_call_may_end_one_worker_at_once(deadline_s, monkeypatch):
    """The thread of the deadline kills the worker while the thread of the call, which sees it die, kills it too."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    runner = processes(workers=1, deadline=deadline_s)
    worker = runner._workers[0]
    monkeypatch.setattr(worker, "_start", lambda: fork_one_that_sleeps(worker))
    try:
        for _ in range(30):
            worker._start()
            deadline = threading.Thread(target=worker.kill)
            deadline.start()
            with pytest.raises((EOFError, OSError)):
                worker._connection.recv()
            worker.kill()
            assert not worker._process.is_alive()
            deadline.join()
    finally:
        sys.setswitchinterval(interval)
        runner.close()


def fork_one_that_sleeps(worker: Any) -> None:
    """Gives `worker` a process that costs a millisecond to start."""
    context = multiprocessing.get_context("fork")
    worker._connection, theirs = context.Pipe()
    worker._process = context.Process(target=time.sleep, args=(600,), daemon=True)
    worker._process.start()
    theirs.close()


async def test_a_worker_that_is_killed_while_it_is_idle_costs_no_call(deadline_s):
    runner = processes(workers=1, deadline=deadline_s)
    try:
        (pid, _), verdict = await judge(runner, "process"), (1.0, {})
        os.kill(int(pid), signal.SIGKILL)
        assert await judge(runner, "fine") == verdict
    finally:
        runner.close()


async def test_a_worker_stopped_in_a_call_is_killed_at_the_deadline(deadline_s):
    runner = processes(workers=1, deadline=deadline_s)
    try:
        pid, _ = await judge(runner, "process")
        late = asyncio.create_task(judge(runner, "compute for ever"))
        await asyncio.sleep(0.5)
        os.kill(int(pid), signal.SIGSTOP)
        error = await late
        assert isinstance(error, DeadlineError) and error.code == "deadline" and runner.killed == 1
        assert await judge(runner, "fine") == (1.0, {})
        assert not psutil.pid_exists(int(pid))
    finally:
        runner.close()


async def test_a_stopped_worker_delays_no_other_call(deadline_s):
    runner = processes(workers=2, deadline=deadline_s)
    try:
        (first, _), (second, _) = await asyncio.gather(judge(runner, "process"), judge(runner, "process"))
        assert first != second
        os.kill(int(first), signal.SIGSTOP)
        calls = [asyncio.create_task(judge(runner, "process")) for _ in range(3)]
        done, waiting = await asyncio.wait(calls, timeout=8.0)
        assert sum(call.result() == (second, {}) for call in done) >= 2 and len(waiting) <= 1
        assert first not in [(await call)[0] for call in waiting], "the third is judged by a new process"
    finally:
        runner.close()


async def test_a_cancelled_call_ends_and_frees_its_worker(deadline_s):
    runner = processes(workers=1, deadline=60)
    try:
        await judge(runner, "fine")
        call = asyncio.create_task(judge(runner, "compute for ever"))
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(50):
            assert await judge(runner, "fine") == (1.0, {})
    finally:
        runner.close()


def test_thread_and_process_are_chosen_by_the_hook_or_the_key():
    for config, kind in (
        (Reward(), RewardPool),
        (Reward(isolation="process", workers=1), RewardProcesses),
        (Reward(function="math", workers=1), RewardProcesses),
        (Reward(parts=[{"name": "m", "function": "math"}], workers=1), RewardProcesses),
    ):
        runner = reward_runner(config, load_reward(config, {}), "", {})
        runner.close()
        assert isinstance(runner, kind)


def test_workers_end_when_the_driver_is_killed(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import asyncio\n"
        "from tests.extras.rewards.reward_stand import context, trajectory\n"
        "from tests.unit.rollout.test_reward_processes import processes\n"
        "async def main():\n"
        "    runner = processes(workers=1)\n"
        "    pid, _ = await runner.judge(context('process'), trajectory())\n"
        "    print(int(pid), flush=True)\n"
        "    await runner.judge(context('compute for ever'), trajectory())\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    driver = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert driver.stdout is not None
    worker = psutil.Process(int(driver.stdout.readline()))
    time.sleep(0.2)
    driver.send_signal(signal.SIGKILL)
    driver.wait(60)
    driver.stdout.close()
    wait_for(lambda: not lives(worker))
