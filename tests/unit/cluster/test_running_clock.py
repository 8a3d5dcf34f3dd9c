"""Deadlines count the time in which the process ran: a stopped driver blames no process for unread answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from slimx.runtime.clocks import STALL_S, TICK_S, RunningClock, RunningLoop


class Source:
    """Monotonic seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_gap_that_only_a_stopped_process_lets_pass_is_left_out_once():
    source = Source()
    clock = RunningClock(source)
    source.now += STALL_S
    assert clock.time() == 100 + STALL_S and clock.lost == 0, "short gaps are work"
    source.now += 70
    assert clock.time() == pytest.approx(100 + STALL_S + TICK_S)
    assert clock.lost == pytest.approx(70 - TICK_S)
    source.now += 1
    assert clock.time() == pytest.approx(101 + STALL_S + TICK_S), "it goes on"


def test_timers_of_the_loop_stand_still_with_the_clock():
    source, fired = Source(), []
    loop = RunningLoop(RunningClock(source))
    try:
        loop.call_later(20, fired.append, 1)
        source.now += 70
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert not fired
        for _ in range(20):
            source.now += 1
            loop.call_soon(loop.stop)
            loop.run_forever()
        assert fired == [1]
    finally:
        loop.close()


ROLLOUT = """
import asyncio, sys, threading, time
from slimx.runtime.clocks import RunningClock, RunningLoop

async def main():
    answer = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    print("waiting", flush=True)

    def hear():
        sys.stdin.readline()
        loop.call_soon_threadsafe(answer.set_result, "kept")

    threading.Thread(target=hear).start()
    try:
        async with asyncio.timeout(3):
            print(await answer, flush=True)
    except TimeoutError:
        print("given up", flush=True)

clock = RunningClock()
clock.keep()
loop = RunningLoop(clock)
loop.run_until_complete(main())
"""


def test_a_process_stopped_beyond_a_deadline_still_takes_the_response():
    with subprocess.Popen(
        [sys.executable, "-c", ROLLOUT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STALL_S + 2)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)  # by the plain clock it is late now
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "kept\n"
