"""Calls a function of a test module in another process, where it may change torch, SGLang or the environment.

    python -m tests.function_call MODULE FUNCTION < ARGUMENTS

Arguments and result are JSON. The result is the last line of the output.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.needed import ROOT
from tests.warm.sglang import run_with_sglang

DEADLINE_S = 600.0
"""Seconds for one call, for hangs."""


def call_in_process(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Returns the result of `function` in a new process; `environment` is added to this process's."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words_of(function)],
        input=json.dumps(arguments),
        env=os.environ | dict(environment or {}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return result_of(done)


def call_with_sglang(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of `function` in a process that has imported SGLang for the CPU."""
    return result_of(run_with_sglang(*words_of(function), stdin=json.dumps(arguments)))


def words_of(function: Callable[..., Any]) -> list[str]:
    """Returns the arguments of Python that call `function`."""
    return ["-m", __name__, function.__module__, function.__qualname__]


def result_of(done: subprocess.CompletedProcess[str]) -> Any:
    """Returns the result in the output of a process that has ended."""
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(module: str, name: str) -> None:
    function = getattr(importlib.import_module(module), name)
    print(json.dumps(function(*json.load(sys.stdin))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
