"""The gate closes in a bounded time, whatever the requests that are out do."""

from __future__ import annotations

import asyncio

from slimx.rollout import gate
from slimx.rollout.gate import Gate


async def test_a_request_that_will_not_be_cancelled_does_not_keep_the_gate_from_closing(monkeypatch):
    monkeypatch.setattr(gate, "CANCEL_S", 0.05)
    ended, out = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    async def abort() -> None: ...

    async def rollout() -> None:
        request = asyncio.ensure_future(stubborn())
        async with closed.letting_out(request):
            out.set()
            await asyncio.wait({request})

    closed = Gate()
    asking = asyncio.create_task(rollout())
    try:
        async with asyncio.timeout(10):
            await out.wait()
            await closed.close(abort, deadline_s=0.05)
            assert not closed.is_open and closed.out == 1
            asking.cancel()
            await asyncio.wait({asking})  # which does not wait for the request either
            assert closed.out == 0
    finally:
        ended.set()
