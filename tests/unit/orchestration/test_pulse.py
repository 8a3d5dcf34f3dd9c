"""An event loop that a hook blocks: the run ends, and names the hook; a loop that is only late goes on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimx.config.load import load_config
from slimx.errors import LOST, DeadlineError
from slimx.orchestration.lifetime.hangs import LOOK_S, Pulse, pulse_deadline
from tests.unit.orchestration.test_lifetime import PRELUDE, ended

# A run of the real driver's loop, Ray left out, whose generate hook is in a file of the user's.
RUN = (
    PRELUDE
    + """
from pathlib import Path
from slimx.observability.live.run_lock import locked
config.run.dir, config.cluster.stop_deadline = sys.argv[1], 60.0
config.trainer.watch_deadline = config.rollout.rollout_deadline = 3.0
async def work(alarm):
    sys.path.insert(0, config.run.dir)
    import hooks
    print("up", flush=True)
    with locked(Path(config.run.dir)):
        await hooks.generate(None, None)
run(work)
"""
)
HOOK = """import ctypes, gc, re, time
from asyncio import sleep

async def generate(ctx, prompt):
    {}
"""


SLOW = """
config.trainer.watch_deadline = config.rollout.rollout_deadline = 0.5
async def write(*_):
    await asyncio.sleep(1.5)
lifetime.keep_stacks = write
"""
"""Stacks that take longer than the deadline."""


def run(directory: Path, line: str, before: str = "") -> subprocess.Popen[str]:
    (directory / "hooks.py").write_text(HOOK.format(line))
    argv = [sys.executable, "-c", RUN.replace("async def work", f"{before}async def work"), str(directory)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("line", ["time.sleep(600)", "while True: pass", "ctypes.CDLL(None).sleep(600)"])
def test_a_hook_that_blocks_the_loop_ends_the_run_and_is_named(tmp_path: Path, line: str) -> None:
    status, sentences = ended(run(tmp_path, line), seconds=120)
    assert status == LOST and len(sentences) == 1
    assert f"generate ({tmp_path / 'hooks.py'}, line 5)" in sentences[0]
    (file,) = (tmp_path / "stacks").glob("*.txt")
    assert "hooks.py:5" in file.read_text() or "not permitted" in file.read_text().lower()


def test_a_loop_that_computes_leaves_its_stacks_the_time_that_they_take(tmp_path: Path) -> None:
    status, sentences = ended(run(tmp_path, "while True: pass", SLOW), seconds=120)
    assert status == LOST and len(sentences) == 1


def test_a_c_call_that_keeps_pythons_lock_ends_the_run_and_is_named(tmp_path: Path) -> None:
    process = run(tmp_path, "re.match('(a+)+$', 'a' * 60 + 'b')")
    try:
        _, text = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == LOST
    assert f'File "{tmp_path / "hooks.py"}", line 5 in generate' in text


def test_a_driver_that_is_stopped_for_longer_than_the_deadline_goes_on(tmp_path: Path) -> None:
    process = run(tmp_path, "for _ in range(20): await sleep(0.1)")
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    assert ended(process) == (0, [])


def test_a_loop_that_turns_late_and_one_that_ends_are_left_alone() -> None:
    struck: list[DeadlineError] = []
    now = 0.0

    async def main() -> None:
        nonlocal now
        with Pulse(60.0, struck.append, lambda: now):
            for _ in range(4):
                now += 40.0
                time.sleep(1.5 * LOOK_S)  # blocks the loop, but not for long
                await asyncio.sleep(0)
        now += 80.0
        time.sleep(3 * LOOK_S)

    asyncio.run(main())
    assert not struck


def test_the_deadline_is_that_of_rollouts_and_never_below_that_of_ranks() -> None:
    overrides = ["rollout.rollout_deadline=30", "schedule.step_deadline=50"]
    for watch, deadline in ((20, 30), (60, 60)):
        config = load_config("configs/recipes/gsm8k-qwen2.5-0.5b.yaml", [*overrides, f"trainer.watch_deadline={watch}"])
        assert pulse_deadline(config) == deadline
