"""Connections to the live page that come in one turn of the loop."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from slimx.extras.watch.page.connections import BoundedConnection


class Transport(asyncio.Transport):
    """One of which nothing is read."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.aborted = False

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


async def test_the_one_that_came_first_in_a_turn_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "most", 2)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 0.0)  # as within one turn of uvloop's
    config, state = uvicorn.Config(Starlette(), log_config=None), ServerState()
    config.load()
    transports = [Transport() for _ in range(6)]
    for number, transport in enumerate(transports, start=1):
        BoundedConnection(config, state, {}).connection_made(transport)
        assert [each.aborted for each in transports].count(True) == max(0, number - 2)
        assert [each.aborted for each in transports[:number]] == [at < number - 2 for at in range(number)]
