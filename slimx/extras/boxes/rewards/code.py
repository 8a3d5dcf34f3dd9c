"""A reward for programming tasks: the fraction of a prompt's tests that the program in the final answer passes.

Tests are in the prompt's metadata, in one of two formats:

    {"tests": [{"input": "2 3\\n", "output": "5"}, ...]}     the program reads stdin and writes stdout
    {"tests": ["assert add(2, 3) == 5", ...]}                 Python that uses what the program defines

The program cannot influence the comparison. Output is compared here; assertions run in a separate sandbox:

    slimx --starts--> judge (`judge.py`) <--values as JSON--> host (`host.py`)
          <--exit status of the judge, reported by bubblewrap--
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.boxes.programs.answers import last_program
from slimx.extras.boxes.programs.sandbox import Limits, ProgramResult, Sandbox, in_thread
from slimx.rewards.context import Context
from slimx.rewards.needs import checked_by

UNFIT = 3
"""Exit status of the judge for a test that is invalid or cannot be run outside the program's sandbox (`UNFIT` in
judge.py)."""


def check(**options: Any) -> None:
    """Raises SlimxError if the sandbox does not isolate programs on this machine."""
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
    """Returns the fraction of the prompt's tests that the program in the final answer passes.

    `all_or_nothing`: True to return 1.0 if all tests pass and otherwise 0.0. `seconds`, `memory_mib`, `processes`:
    limits of each test. A final answer without a program scores 0.0. Raises SlimxError for a prompt without tests or
    with an invalid test, or if the sandbox cannot start.
    """
    tests = ctx.prompt.metadata.get("tests")
    if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has no list of valid tests in metadata.tests for {__name__}; set "
            'metadata.tests to a nonempty list of assertions or of {"input", "output"} objects',
            code="reward.tests",
            about=ctx.prompt.id,
        )
    code = last_program(ctx.final_answer)
    if code is None:
        return 0.0
    sandbox = _sandbox(seconds=seconds, memory_mib=memory_mib, processes=processes)
    passed = 0
    for test in tests:
        if await in_thread(partial(_passes, sandbox, code, test, ctx.prompt.id)):
            passed += 1
        elif all_or_nothing:
            return 0.0
    return passed / len(tests)


def _is_test(test: object) -> bool:
    return isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= test.keys())


def _passes(sandbox: Sandbox, code: str, test: str | dict[str, str], prompt: str, stop: threading.Event) -> bool:
    if isinstance(test, dict):
        result = sandbox.run_blocking(code, stdin=test["input"], stop=stop)
        return result.ok and result.stdout.split() == test["output"].split()
    judge = _judged(sandbox, code, test, stop)
    if judge.ended == "exit" and judge.status == UNFIT:
        raise SlimxError(
            f"a test in metadata.tests of prompt {prompt!r} cannot be run ({judge.stderr.strip()[-300:]}); correct the "
            "code of the test",
            code="reward.test",
            about=prompt,
        )
    return judge.ok


def _judged(sandbox: Sandbox, code: str, test: str, stop: threading.Event) -> ProgramResult:
    """Runs one test in the judge's sandbox and the program under test in another one. Returns the judge's result. Only
    the program's responses to requests reach the judge."""
    judge = _source("judge.py")
    host = _source("host.py")
    wire = _source("wire.py")
    over = threading.Event()
    requests_read, requests_write = os.pipe()
    responses_read, responses_write = os.pipe()

    def run_program() -> ProgramResult:
        files = {"program.py": code, "wire.py": wire}
        try:
            return sandbox.run_blocking(host, stdin=requests_read, stdout=responses_write, files=files, stop=over)
        finally:  # closes the pipe, so that the judge reads end-of-file
            os.close(responses_write)
            os.close(requests_read)

    with ThreadPoolExecutor(1) as executor:
        program = executor.submit(run_program)
        try:
            files = {"test": test, "wire.py": wire}
            verdict = sandbox.run_blocking(judge, stdin=responses_read, stdout=requests_write, files=files, stop=stop)
        finally:
            over.set()
            for descriptor in (responses_read, requests_write):
                os.close(descriptor)
    program.result()  # raises if the sandbox could not start
    return verdict


@cache
def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


@cache
def _sandbox(**limits: Any) -> Sandbox:
    return Sandbox(Limits(**limits))
