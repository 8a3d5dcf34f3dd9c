"""The gate closes in a bounded time, and a rollout ends in a bounded time, whatever the requests that are out do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow import gate, interruption
from slimx.rollout.flow.gate import Gate
from slimx.rollout.flow.interruption import Interruptible
from slimx.rollout.flow.progress import Journal
from slimx.rollout.flow.slots import Slots
from slimx.runtime.clocks import Clock
from tests.refusals import refused

SAMPLING = {"max_new_tokens": 4}


async def abort() -> None: ...


class Stubborn:
    """A client whose requests will not be cancelled, and whose streams bring one token and no end."""

    def __init__(self) -> None:
        self.out, self.ended = asyncio.Event(), asyncio.Event()

    async def generate(self, *_: Any) -> None:
        self.out.set()
        while not self.ended.is_set():
            try:
                await self.ended.wait()
            except asyncio.CancelledError:
                continue

    @asynccontextmanager
    async def stream(self, *_: Any) -> AsyncIterator[AsyncIterator[Completion]]:
        yield self._pieces()

    async def _pieces(self) -> AsyncIterator[Completion]:
        yield Completion(np.array([5], np.int32), np.zeros(1, np.float32), [(0, 1, 1)], "", None, 0, 0.0)
        self.out.set()
        await self.ended.wait()


@pytest.fixture
def stubborn(monkeypatch) -> Stubborn:
    for module in (gate, interruption):
        monkeypatch.setattr(module, "CANCEL_S", 0.05)
    return Stubborn()


def behind(client: Any, closed: Gate, clock: Clock) -> Interruptible:
    return Interruptible(client, Slots(4), clock, closed, Journal())


async def test_a_request_that_cannot_be_cancelled_blocks_nothing(stubborn):
    closed = Gate()
    asking = asyncio.create_task(behind(stubborn, closed, Clock(600)).generate(GenerationRequest([1], SAMPLING, 0)))
    try:
        async with asyncio.timeout(300):
            await stubborn.out.wait()
            await closed.close(abort, deadline_s=0.05)
            assert not closed.is_open and closed.out == 1
            asking.cancel()
            await asyncio.wait({asking})
        assert asking.cancelled() and closed.out == 0
    finally:
        stubborn.ended.set()


async def test_a_rollout_ends_at_its_deadline_although_its_request_does_not(stubborn):
    try:
        async with asyncio.timeout(300):
            with pytest.raises(TimeoutError):
                async with Clock(0.1) as clock:
                    await behind(stubborn, Gate(), clock).generate(GenerationRequest([1], SAMPLING, 0))
    finally:
        stubborn.ended.set()


async def test_an_endless_stream_is_abandoned(stubborn):
    closed, counts, pieces = Gate(), [], []

    async def read() -> None:
        async with behind(stubborn, closed, Clock(600)).stream(GenerationRequest([1], SAMPLING, 0)) as stream:
            async for piece in stream:
                pieces.append(piece.token_ids.tolist())

    async def counted() -> None:
        counts.append(closed.out)

    reading = asyncio.create_task(read())
    async with asyncio.timeout(300):
        await stubborn.out.wait()
        await closed.close(counted, deadline_s=0.05)
        with refused("request.given_up", about="rollout.interrupt_deadline"):
            await reading
    assert pieces == [[5]] and closed.out == 0 and set(counts) == {1}


async def test_an_unread_stream_is_polled_for_its_end():
    closed, counts, left = Gate(), [], asyncio.Event()

    async def hold() -> None:
        async with closed.tracked(asyncio.get_running_loop().create_future()):
            await left.wait()

    async def counted() -> None:
        counts.append(closed.out)

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    await closed.close(counted, deadline_s=0.05)
    assert 1 <= len(counts) <= 3
    counts.clear()
    await closed.close(counted, deadline_s=0.05)
    assert not counts and closed.out == 1
    left.set()
    await holding
    assert closed.out == 0


async def test_a_gate_is_closed_when_what_streams_have_brought_is_kept(stubborn):
    closed, journal, aborted = Gate(), Journal(), asyncio.Event()

    async def pieces() -> AsyncIterator[Completion]:
        yield Completion(np.array([5], np.int32), np.zeros(1, np.float32), [(0, 1, 1)], "", None, 0, 0.0)
        stubborn.out.set()
        await aborted.wait()
        yield Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "abort", None, 0, 0.0)

    async def end() -> None:
        aborted.set()

    async def read() -> None:
        async with Interruptible(stubborn, Slots(4), Clock(600), closed, journal).stream(
            GenerationRequest([1], SAMPLING, 0)
        ) as stream:
            async for _ in stream:
                pass

    stubborn._pieces = pieces
    reading = asyncio.create_task(read())
    async with asyncio.timeout(300):
        await stubborn.out.wait()
        await closed.close(end, deadline_s=60)
        assert closed.out == 0
        (entry,) = journal.entries()
        assert entry.completion.token_ids.tolist() == [5]
        reading.cancel()
        await asyncio.wait({reading})
