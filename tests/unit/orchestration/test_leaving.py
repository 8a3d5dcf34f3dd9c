"""SIGUSR1: what the loop waits for is given up or kept, and the command line ends with the code that says try again."""

from __future__ import annotations

import asyncio
import sys

import pytest

from slimx import cli
from slimx.errors import Preempted
from slimx.runtime.tasks import unless
from tests.refusals import numbers


async def test_awaited_work_is_cancelled_at_a_preemption():
    ended = []

    async def generate() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 1

    leaving = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, leaving.set)
    assert await unless(leaving, generate()) is None
    assert ended == ["cancelled"]


async def test_a_batch_that_comes_first_is_kept_and_a_failure_is_raised():
    async def batch() -> str:
        await asyncio.sleep(0)
        return "batch"

    async def broken() -> str:
        raise ZeroDivisionError

    assert await unless(asyncio.Event(), batch()) == "batch"
    with pytest.raises(ZeroDivisionError):
        await unless(asyncio.Event(), broken())


def test_the_command_line_ends_with_75_and_says_which_step_is_saved(monkeypatch, capsys):
    def leave(**_: object) -> None:
        raise Preempted(7, 100)

    monkeypatch.setattr(cli, "app", leave)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 75
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("slimx: ") and numbers(message) == [7, 100]
