"""The reward of programming tasks: which share of a prompt's tests the program in the final answer passes.

Tests stand in the prompt's metadata, in one of two forms:

    {"tests": [{"input": "2 3\\n", "output": "5"}, ...]}     the program reads stdin and writes stdout
    {"tests": ["assert add(2, 3) == 5", ...]}                 Python that uses what the program defines

Neither is decided where the program could decide it. Output is compared here; assertions run in a sandbox of their own:

    slimx --starts--> judge (`judge.py`) <--values as JSON--> host (`host.py`)
          <--exit status of the judge, reported by bubblewrap--
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.boxes.programs.answers import last_program
from slimx.extras.boxes.programs.sandbox import Limits, Ran, Sandbox, in_thread
from slimx.rewards.context import Context
from slimx.rewards.needs import checked_by

UNFIT = 3
"""The judge's exit status for a test that cannot be run this way (`UNFIT` in judge.py)."""


def check(**options: Any) -> None:
    """Refuse a run on a machine where the sandbox does not hold."""
    _sandbox(**{key: value for key, value in options.items() if key in Limits.__dataclass_fields__}).check()


@checked_by(check)
async def reward(
    ctx: Context,
    trajectory: Trajectory,
    *,
    all_or_nothing: bool = True,
    seconds: float = 10.0,
    memory_mib: int = 512,
    processes: int = 8,
) -> float:
    """The share of tests that pass; with `all_or_nothing` 1.0 if all do, else 0.0. A final answer without a program
    gets 0.0. `seconds`, `memory_mib` and `processes` are the limits of each test.

    Raises SlimxError for a prompt without tests or with one that cannot be run, and where the sandbox cannot start."""
    tests = ctx.prompt.metadata.get("tests")
    if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has no tests for {__name__}; give metadata.tests a list of assertions or of "
            '{"input", "output"}',
            code="reward.tests",
            about=ctx.prompt.id,
        )
    code = last_program(ctx.final_answer)
    if code is None:
        return 0.0
    sandbox = _sandbox(seconds=seconds, memory_mib=memory_mib, processes=processes)
    passed = 0
    for test in tests:
        right = await in_thread(lambda stop, test=test: _passes(sandbox, code, test, stop, ctx.prompt.id))
        if all_or_nothing and not right:
            return 0.0
        passed += right
    return passed / len(tests)


def _is_test(test: Any) -> bool:
    return isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= test.keys())


def _passes(sandbox: Sandbox, code: str, test: str | dict[str, str], stop: threading.Event, prompt: str) -> bool:
    if isinstance(test, dict):
        ran = sandbox.run_blocking(code, stdin=test["input"], stop=stop)
        return ran.ok and ran.stdout.split() == test["output"].split()
    judge = _judged(sandbox, code, test, stop)
    if judge.ended == "exit" and judge.status == UNFIT:
        raise SlimxError(
            f"a test of prompt {prompt!r} cannot be run: {judge.stderr.strip()[-300:]}; correct it in metadata.tests",
            code="reward.test",
            about=prompt,
        )
    return judge.ok


def _judged(sandbox: Sandbox, code: str, test: str, stop: threading.Event) -> Ran:
    """Run one test in the judge's sandbox and the program in another; returns how the judge ended. Nothing that the
    program does but answer reaches the judge."""
    judge, host, wire = (_source(name) for name in ("judge.py", "host.py", "wire.py"))
    over = threading.Event()
    asked_read, asked_write = os.pipe()
    answers_read, answers_write = os.pipe()

    def run_program() -> Ran:
        files = {"program.py": code, "wire.py": wire}
        try:
            return sandbox.run_blocking(host, stdin=asked_read, stdout=answers_write, files=files, stop=over)
        finally:  # the judge then reads the end of a program that has ended
            os.close(answers_write)
            os.close(asked_read)

    with ThreadPoolExecutor(1) as beside:
        program = beside.submit(run_program)
        try:
            files = {"test": test, "wire.py": wire}
            ran = sandbox.run_blocking(judge, stdin=answers_read, stdout=asked_write, files=files, stop=stop)
        finally:
            over.set()
            for descriptor in (answers_read, asked_write):
                os.close(descriptor)
    program.result()  # raises what kept the sandbox from starting
    return ran


@cache
def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


@cache
def _sandbox(**limits: Any) -> Sandbox:
    return Sandbox(Limits(**limits))
