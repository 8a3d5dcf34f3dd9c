"""The end of a driver: by a signal that it hears in any call, in bounded time, and with what a hook left to itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from slimx.errors import LOST, DeadlineError, Interrupted, PartLost, Preempted, SlimxError, ending_of
from slimx.orchestration.lifetime.hangs import Watchdog
from slimx.orchestration.lifetime.leftovers import LOOK_S, POLL_S, unguarded
from slimx.orchestration.lifetime.lifetime import Alarm, EndingStack, interruptible, run_loop
from slimx.orchestration.lifetime.signals import TWICE_S, Signals
from slimx.runtime.tasks import in_thread
from tests.processes import lives, wait_for

PRELUDE = """
import asyncio, ctypes, os, sys, threading, time
from types import SimpleNamespace
from slimx.orchestration.lifetime import lifetime
from slimx.errors import PartLost

config = SimpleNamespace(
    cluster=SimpleNamespace(stop_deadline=2.0, ray_deadline=60.0), checkpoint=SimpleNamespace(grace=None),
    rollout=SimpleNamespace(rollout_deadline=3600.0), schedule=SimpleNamespace(step_deadline=3600.0),
    trainer=SimpleNamespace(watch_deadline=60.0), run=SimpleNamespace(dir="."),
)
lifetime.start_ray = lambda *_, **__: None
lifetime.stop_ray = lambda: None
lifetime.probes = dict
def blocked():  # as a call into Ray's library: without the GIL, and for ever
    while True:
        ctypes.CDLL(None).sleep(600)

def run(work):
    from slimx import cli
    def main():
        lifetime.run_with_ray(config, "cpu", work)
    cli.app, cli.starts_ray = lambda **options: main(), lambda *_: False
    cli.entry()
"""


def driver(work: str, *, grace: float | None = None) -> subprocess.Popen[str]:
    """Returns a process that runs `work`, the body of the run, as the command line does; Ray is left out."""
    body = (
        PRELUDE
        + f"config.checkpoint.grace = {grace}\n"
        + "async def work(alarm):\n"
        + "".join(f"    {line}\n" for line in work.splitlines())
        + "run(work)\n"
    )
    return subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, list[str]]:
    """Returns the exit status and the sentences printed; a driver that hangs is killed."""
    try:
        _, output = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, [line for line in output.splitlines() if line.startswith("slimx: ")]


@pytest.mark.parametrize(
    "work",
    [
        "print('up', flush=True)\nblocked()",  # the event loop itself, as in ray.put without a raylet
        "lifetime.stop_ray = blocked\nprint('up', flush=True)\nawait asyncio.sleep(600)",  # without a GCS
        "print('up', flush=True)\nwhile True:\n    try:\n        await asyncio.sleep(600)\n"
        "    except asyncio.CancelledError: pass",  # a task that will not be cancelled
    ],
)
def test_sigterm_ends_a_hanging_driver_with_its_code(work):
    process = driver(work)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    status, sentences = ended(process)
    assert status == 128 + signal.SIGTERM and len(sentences) == 1 and "SIGTERM" in sentences[0]


def test_a_failure_with_a_hanging_clean_up_keeps_its_code():
    status, sentences = ended(
        driver(
            "async with lifetime.EndingStack(alarm) as stack:\n"
            "    stack.push_async_callback(asyncio.to_thread, time.sleep, 600)\n"
            "    raise PartLost('trainer rank 1 is gone', code='x')"
        )
    )
    assert status == LOST and len(sentences) == 1 and "trainer rank 1" in sentences[0]


def test_endless_threads_and_tasks_do_not_keep_a_finished_run():
    began = time.monotonic()
    status, sentences = ended(
        driver(
            "for _ in range(64):\n"
            "    asyncio.ensure_future(asyncio.to_thread(time.sleep, 600))\n"
            "await asyncio.sleep(0.1)\n"
            "from slimx.runtime.tasks import in_thread\n"
            "await asyncio.wait_for(in_thread(print, 'kept'), 30)"  # slimx's own work does not wait behind them
        ),
        seconds=100,
    )
    assert status == 0 and time.monotonic() - began < 90
    assert sentences == []


async def test_internal_work_runs_while_hooks_fill_the_executor():
    over = threading.Event()
    hooks = [asyncio.ensure_future(asyncio.to_thread(over.wait, 60)) for _ in range(64)]
    try:
        async with asyncio.timeout(30):
            assert await in_thread(lambda value: value + 1, 1) == 2
            with pytest.raises(SlimxError) as error:
                await in_thread(_fail)
        assert error.value.code == "test"
    finally:
        over.set()
        await asyncio.gather(*hooks)


def _fail() -> None:
    raise SlimxError("broken", code="test")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (SlimxError("refused"), 2),
        (PartLost("lost"), 69),
        (DeadlineError("a rank", 3.0, "trainer rank 0"), 69),
        (Preempted(3, 9), 75),
        (Interrupted(signal.SIGTERM), 143),
        (Interrupted(signal.SIGINT), 130),
        (KeyError("a mistake"), 1),
    ],
)
def test_every_kind_of_ending_has_its_exit_code(error, status):
    assert ending_of(error)[0] == status


def test_the_alarm_ends_the_run_with_its_error_after_the_clean_up():
    done, errors = [], []

    async def work(alarm: Alarm) -> None:
        async with EndingStack(alarm) as stack:
            stack.callback(done.append, "closed")
            alarm.ring_after(_lost())
            await asyncio.sleep(600)

    with Signals() as signals, pytest.raises(PartLost) as error:
        run_loop(interruptible(work, signals, errors.append))
    assert error.value.about == "rank 1" and done == ["closed"] and errors == [error.value]


async def _lost() -> SlimxError:
    await asyncio.sleep(0.01)
    return PartLost("lost", about="rank 1")


def test_a_watch_that_fails_ends_the_run_too():
    async def work(alarm: Alarm) -> None:
        alarm.ring_after(_broken())
        await asyncio.sleep(600)

    with Signals() as signals, pytest.raises(SlimxError) as error:
        run_loop(interruptible(work, signals, lambda error: None))
    assert error.value.code == "watch"


def test_a_refusal_before_the_watches_begin_leaves_no_coroutine(unawaited):
    async def start() -> None:
        alarm = Alarm()
        alarm.ring_after(_lost())
        alarm.quiet()  # as a refusal does, before the watch has run

    run_loop(start())
    assert unawaited() == []


async def _broken() -> SlimxError:
    raise ZeroDivisionError


def test_sigusr1_asks_to_leave_and_ends_nothing():
    left = []

    async def work(alarm: Alarm) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(alarm.leaving.wait(), 30)
        left.append(True)

    with Signals() as signals:
        run_loop(interruptible(work, signals, lambda error: None))
        assert signals.received == []
    assert left == [True]


def test_a_preemption_signal_before_the_loop_is_not_lost():
    left = []

    async def work(alarm: Alarm) -> None:
        await asyncio.wait_for(alarm.leaving.wait(), 30)
        left.append(True)

    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        run_loop(interruptible(work, signals, lambda error: None))
    assert left == [True]


def test_sigterm_with_a_grace_saves_and_leaves():
    async def work(alarm: Alarm) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(alarm.leaving.wait(), 30)
        raise Preempted(3, 9)

    with Signals() as signals, pytest.raises(Preempted):
        run_loop(interruptible(work, signals, lambda error: None, grace=60.0))


@pytest.mark.parametrize(("grace", "second"), [(0.2, None), (60.0, signal.SIGTERM), (60.0, signal.SIGINT)])
def test_a_second_signal_or_the_end_of_the_grace_stops_the_run(grace, second):
    async def work(alarm: Alarm) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(alarm.leaving.wait(), 30)
        if second is not None:
            os.kill(os.getpid(), signal.SIGTERM)  # the same again, as one that a launcher sends to a whole job
            await asyncio.sleep(TWICE_S)
            waited.append(second)
            os.kill(os.getpid(), second)
        await asyncio.sleep(600)

    began, waited = time.monotonic(), []
    with Signals() as signals, pytest.raises(Interrupted) as error:
        run_loop(interruptible(work, signals, lambda error: None, grace=grace))
    assert waited == ([] if second is None else [second])
    assert error.value.signum == signal.SIGTERM and 0 <= time.monotonic() - began < 50


def test_a_save_that_hangs_is_ended_when_grace_and_stop_deadline_are_over():
    process = driver("print('up', flush=True)\nblocked()", grace=1.0)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    status, sentences = ended(process)
    assert status == 128 + signal.SIGTERM and len(sentences) == 1


@pytest.fixture
def sighup_kills():
    """SIGHUP's default, whatever pytest itself was started with: under nohup it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_came_before_the_loop_is_not_lost(signum, sighup_kills):
    async def work(alarm: Alarm) -> None:
        await asyncio.sleep(600)

    with Signals() as signals:
        os.kill(os.getpid(), signum)
        with pytest.raises(Interrupted) as error:
            run_loop(interruptible(work, signals, lambda error: None))
    assert error.value.signum == signum


def test_a_closed_terminal_leaves_a_run_under_nohup_alone():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)  # heard after it
            heard = threading.Event()
            signals.subscribe(lambda signum: heard.set())
            assert heard.wait(60) and not signals.received
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_of_before_are_back_afterwards():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with Signals():
        assert all(signal.getsignal(signum) is not handler for signum, handler in before.items())
    assert {signum: signal.getsignal(signum) for signum in before} == before


def test_a_watchdog_ends_nothing_disarmed_and_keeps_its_first_arming():
    left: list[int] = []
    with Watchdog(left.append) as watchdog:
        watchdog.arm(0.05, 3, "first")
        watchdog.arm(60, 4, "second")
        wait_for(lambda: left)
    assert left == [3]
    before = set(threading.enumerate())
    with Watchdog(left.append) as watchdog:
        watchdog.arm(60, 5, "third")
    wait_for(lambda: set(threading.enumerate()) <= before)
    assert left == [3]


# One process alone writes to the pipe: what two write there may mix.
OWNER = """
import os, subprocess, sys, time
from slimx.orchestration.lifetime.leftovers import watch_over_this_process
watch_over_this_process()
child = subprocess.Popen([sys.executable, "-c", "import subprocess, time; "
    "print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"], stdout=subprocess.PIPE, text=True,
    start_new_session=True)
guard = subprocess.Popen([sys.executable, "-m", "slimx.runtime.process", "--owner", str(os.getpid()),
    "--", "sleep", "600"], start_new_session=True)
print(child.stdout.readline().strip(), child.pid, guard.pid, flush=True)
time.sleep(600)
"""


def test_children_of_a_killed_driver_end_except_guards():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    grandchild, child, guard = processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    try:
        until = time.monotonic() + 120
        while not (guarded := guard.children()) and time.monotonic() < until:
            time.sleep(0.1)
        assert guarded
        assert {one.pid for one in unguarded(psutil.Process(owner.pid))} >= {grandchild.pid, child.pid}
        assert unguarded(psutil.Process(owner.pid)).isdisjoint([guard, *guarded])
        processes += guarded
        (remains,) = (one for one in psutil.Process(owner.pid).children() if one not in processes)
        slept = remains.num_ctx_switches().voluntary
        wait_for(lambda: remains.num_ctx_switches().voluntary > slept + 2 * LOOK_S / POLL_S)  # it has looked
        grandchild.suspend()  # as a stopped process of Ray's
        owner.kill()
        owner.wait()
        wait_for(lambda: not any(map(lives, processes)))
    finally:
        for one in processes:
            if one.is_running():
                one.kill()


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_task_of_a_hook_that_leaves_does_not_end_the_loop(error: BaseException) -> None:
    caught: list[BaseException] = []

    async def leave() -> None:
        raise error

    async def main() -> None:
        task = asyncio.create_task(leave())
        await asyncio.wait([task])
        caught.append(task.exception())

    run_loop(main())
    assert caught == [error]
