"""Requests that stop in the middle and go on later: partial rollouts, and saves that lose no token.

While the gate is closed no request of a rollout is with an engine. One that was out when it closed is aborted by its
engine and brings what it has; when the gate opens again, the tokens so far are sent once more and the rest is sampled,
perhaps by another weight version. The hook that asked sees one completion. Since a token's random number depends on
seed and position alone, a completion that was cut in two under one version has the tokens of a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType

from slimx.errors import SlimxError
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest, Pending
from slimx.rollout.client.stream import TokenStream
from slimx.rollout.flow.gate import CANCEL_S, Gate
from slimx.rollout.flow.progress import Journal
from slimx.rollout.flow.slots import Slots
from slimx.rollout.hooks import Generator
from slimx.runtime.clocks import Clock


def _aborted(pending: Pending) -> SlimxError:
    return SlimxError(f"a request was aborted by the engine after {pending.count} tokens; its log says why")


async def _pieces(stream: TokenStream, out: asyncio.Future[None]) -> AsyncIterator[Completion]:
    """The pieces of `stream`. Raises SlimxError once the gate has given it up, by cancelling `out`."""
    pieces = aiter(stream)
    while True:
        # Given up while nobody read: what has come since may be all of it.
        limits = {"timeout": CANCEL_S} if out.done() else {}
        piece = asyncio.ensure_future(anext(pieces, None))
        try:
            await asyncio.wait({piece} if limits else {piece, out}, return_when=asyncio.FIRST_COMPLETED, **limits)
            if not piece.done():
                raise SlimxError(
                    "a stream was interrupted, and its engine did not end it within rollout.interrupt_deadline; the "
                    "engine's log says why",
                    code="request.given_up",
                    about="rollout.interrupt_deadline",
                )
        finally:
            if not piece.done():
                piece.cancel()
                await asyncio.wait({piece}, timeout=CANCEL_S)
        if (found := piece.result()) is None:
            return
        yield found


class Interruptible:
    """The engines of one rollout, behind the gate."""

    def __init__(self, client: Generator, slots: Slots, clock: Clock, gate: Gate, journal: Journal) -> None:
        self._client, self._slots, self._clock, self._gate, self._journal = client, slots, clock, gate, journal

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample as `GenerationClient.generate` does. Time before a closed gate does not count against the rollout's
        deadline. Raises SlimxError if the engine aborts a request by itself."""
        pending = self._begin(request)
        while not pending.done:
            await self._opened()
            asked = asyncio.ensure_future(self._ask(pending))
            async with self._gate.tracked(asked):
                await asyncio.wait({asked})  # which a cancelled rollout leaves at once, whatever the request does
                part = None if asked.cancelled() else asked.result()
                interrupted = not self._gate.is_open
            if part is not None:
                pending.add(part)
                self.record(pending)
            if part is not None and part.finish_reason == "abort" and not interrupted:
                raise _aborted(pending)
        return pending.completion

    async def _ask(self, pending: Pending) -> Completion | None:
        """The rest; None if the gate closed before it was asked for."""
        async with self._slots.one(self._clock):
            return await self._client.generate(pending.rest()) if self._gate.is_open else None

    def stream(self, request: GenerationRequest) -> InterruptibleStream:
        """Stream as `GenerationClient.stream` does."""
        return InterruptibleStream(self, self._begin(request))

    @asynccontextmanager
    async def segment(self, request: GenerationRequest, out: asyncio.Future[None]) -> AsyncIterator[TokenStream | None]:
        """A stream of `request`; None if the gate closed before it was asked for. `out` is cancelled if the gate gives
        the stream up."""
        await self._opened()
        async with self._gate.tracked(out), self._slots.one(self._clock):
            if not self._gate.is_open:
                yield None
                return
            async with self._client.stream(request) as stream:
                yield stream

    @property
    def interrupted(self) -> bool:
        """True while the gate is closed: an abort is then its doing."""
        return not self._gate.is_open

    def record(self, pending: Pending) -> None:
        """Keep what came so far."""
        if (came := pending.came) is not None:
            self._journal.record(pending.request, came if pending.done else replace(came, finish_reason="abort"))

    def _begin(self, request: GenerationRequest) -> Pending:
        return Pending(request, self._journal.replay(request))

    async def _opened(self) -> None:
        if not self._gate.is_open:
            with self._clock.standing():
                await self._gate.opened()


class InterruptibleStream:
    """A `TokenStream` in as many segments as it is interrupted times; used as one."""

    def __init__(self, engines: Interruptible, pending: Pending) -> None:
        self._engines, self._pending = engines, pending
        self._segment, self._stream = AsyncExitStack(), None
        self._pieces = self._read()

    async def __aenter__(self) -> InterruptibleStream:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pieces.aclose()
        await self._segment.__aexit__(kind, error, trace)
        if error is None and self._pending.came is not None and not self._pending.done:
            self._finish("stop")  # it was left early
        self._engines.record(self._pending)

    def __aiter__(self) -> AsyncIterator[Completion]:
        return self._pieces

    @property
    def completion(self) -> Completion:
        """All that has come. Raises SlimxError if nothing has."""
        return self._pending.completion

    async def _read(self) -> AsyncIterator[Completion]:
        pending = self._pending
        if pending.came is not None:  # of an earlier run
            yield replace(pending.came, routed_experts=None)
        while not pending.done:
            out: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stream = await self._segment.enter_async_context(self._engines.segment(pending.rest(), out))
            interrupted = self._stream is None
            if self._stream is not None:
                async for piece in _pieces(self._stream, out):
                    interrupted = piece.finish_reason == "abort" and self._engines.interrupted
                    if piece.finish_reason == "abort" and not interrupted:
                        raise _aborted(pending)
                    last = bool(piece.finish_reason) and not interrupted
                    if last or len(piece.token_ids):
                        shown = replace(piece, finish_reason="")
                        pending.add(shown)
                        if last:
                            self._finish(piece.finish_reason)
                        yield piece if last else shown
            await self._segment.aclose()
            if not interrupted:
                return
            self._engines.record(pending)

    def _finish(self, reason: str) -> None:
        """End the completion. The last segment was sent all tokens before its own, and brings the experts of these."""
        routed = self._stream is not None and self._pending.request.routed_experts
        self._pending.finish(reason, self._stream.completion.routed_experts if routed else None)
