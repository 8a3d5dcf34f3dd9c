"""The reward of programming tasks: which share of a prompt's tests the program in the response passes.

Tests stand in the prompt's metadata, in one of two forms:

    {"tests": [{"input": "2 3\\n", "output": "5"}, ...]}     the program reads stdin and writes stdout
    {"tests": ["assert add(2, 3) == 5", ...]}                 Python that runs after the program, in its process

Prefer the first: a program can change what runs in its own process.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import cache
from typing import Any

from slimx.data.records import Trajectory
from slimx.environments.fences import last_program
from slimx.environments.sandbox import Limits, Sandbox
from slimx.errors import SlimxError
from slimx.rewards.context import Context
from slimx.rewards.needs import checked_by


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
    """The share of tests that pass; with `all_or_nothing` 1.0 if all do, else 0.0. A response without a program gets
    0.0. `seconds`, `memory_mib` and `processes` are the limits of each test.

    Raises SlimxError for a prompt without tests, or where the sandbox cannot start."""
    tests = ctx.prompt.metadata.get("tests")
    if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has no tests for {__name__}; give metadata.tests a list of assertions or of "
            '{"input", "output"}'
        )
    code = last_program(ctx.text)
    if code is None:
        return 0.0
    sandbox = _sandbox(seconds=seconds, memory_mib=memory_mib, processes=processes)
    passed = 0
    for test in tests:
        right = await asyncio.to_thread(_passes, sandbox, code, test)
        if all_or_nothing and not right:
            return 0.0
        passed += right
    return passed / len(tests)


def _is_test(test: Any) -> bool:
    return isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= test.keys())


def _passes(sandbox: Sandbox, code: str, test: str | dict[str, str]) -> bool:
    if isinstance(test, str):
        # The exit status alone would not do: a program may end the interpreter before the test has run.
        seal = secrets.token_hex()
        harness = f"import sys\n_seal = sys.stdin.read()\nfrom program import *\n{test}\nprint(_seal)\n"
        ran = sandbox.run_blocking(harness, stdin=seal, files={"program.py": code})
        return ran.ok and ran.stdout.endswith(seal + "\n")
    ran = sandbox.run_blocking(code, stdin=test["input"])
    return ran.ok and ran.stdout.split() == test["output"].split()


@cache
def _sandbox(**limits: Any) -> Sandbox:
    return Sandbox(Limits(**limits))
