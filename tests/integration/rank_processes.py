"""Starts the ranks of a test as processes and waits for them."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimx.runtime.ports import free_port
from tests import stacks
from tests.warm.fork import Fork
from tests.warm.interpreter import interpreter

DEADLINE_S = 600.0
"""Seconds for all that the ranks of one job do: who is late hangs. The longest job, four ranks of test_optimizer, took
98 on two cores at a load of 23."""
ENDED_S = 300.0
"""Seconds in which killed ranks are gone."""


def cached[**Key, Value](function: Callable[Key, Value]) -> Callable[Key, Value]:
    """Returns a `functools.cache` that raises the AssertionError of a first call again: failed ranks run once."""

    @functools.cache
    def outcome(*key: Key.args, **options: Key.kwargs) -> Value | AssertionError:
        try:
            return function(*key, **options)
        except AssertionError as error:
            return error

    @functools.wraps(function)
    def call(*key: Key.args, **options: Key.kwargs) -> Value:
        if isinstance(value := outcome(*key, **options), AssertionError):
            raise value
        return value

    return call


def run_ranks(
    function: Callable[[dict[str, Any], int], Any],
    out: Path,
    world: int,
    job: Mapping[str, Any] = MappingProxyType({}),
    *,
    seconds: float = DEADLINE_S,
    role: str = "rank",
) -> list[Any]:
    """Runs `function(job, rank)` for every rank, in processes that have imported what trainers import; returns the
    results by rank, as JSON has them.

    `function`: of a module that ranks import. `out`: directory of the job, which is made if it is missing. `job`: gets
    `out` and the ranks' `init_method`. Output of a rank is in OUT/RANK.log. When one fails or all are late, the others
    are ended, and AssertionError has its output or where each of them hangs. `role`: of the zygote
    (tests/warm/zygote.py).
    """
    out.mkdir(exist_ok=True)
    file = out / "job.json"
    file.write_text(json.dumps({**job, "init_method": f"tcp://127.0.0.1:{free_port()}"}, default=str))
    name = f"{function.__module__}:{function.__qualname__}"
    commands = [["-m", "tests.integration.rank_main", name, str(file), str(rank)] for rank in range(world)]
    run_programs(commands, [out / f"{rank}.log" for rank in range(world)], seconds, role)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


def run_programs(
    commands: Sequence[list[str]], logs: Sequence[Path], seconds: float = DEADLINE_S, role: str = "rank"
) -> None:
    """Runs `python COMMAND` for every command, and waits for all."""
    end, ranks = time.monotonic() + seconds, []
    try:
        for command, log in zip(commands, logs, strict=True):
            ranks.append(start(command, log, role))
        waiting = list(ranks)
        while waiting:
            ended = wait(waiting, max(0.0, end - time.monotonic()))
            late = [rank.pid for rank in waiting]
            assert ended, f"{commands[0]}: not done after {seconds} s\n{stacks.collect(late)}"
            for rank in ended:
                waiting.remove(rank)
                number, code = ranks.index(rank), rank.wait()
                words = logs[number].read_text(errors="replace")[-3000:]
                assert code == 0, f"{commands[number]}: rank {number} ended with {code}\n{words}"
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait(ENDED_S)


def start(command: list[str], log: Path, role: str) -> Fork:
    """Forks one program of the zygotes' `role`, which ends with this process."""
    with open(os.devnull, "rb") as nothing, log.open("wb") as file:
        files = nothing.fileno(), file.fileno(), file.fileno()
        return Fork(interpreter().parent, role, command, files, tied=True)
