"""Requests that are interrupted and later continued, for partial rollouts and for checkpoints that lose no token.

While the gate is closed, no request of a rollout is at an engine. Closing the gate makes the engines abort the requests
in flight, which return their tokens so far. When the gate opens again, these tokens are sent as part of the prompt and
the remaining ones are sampled, perhaps by another weight version. The hook receives one completion. A token's random
number depends only on seed and position, so a completion that was interrupted under one version has the same tokens as
an uninterrupted one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType

from slimx.errors import SlimxError, counted
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest, Pending
from slimx.rollout.flow.gate import CANCEL_S, Gate
from slimx.rollout.flow.progress import Journal
from slimx.rollout.flow.slots import Slots
from slimx.rollout.hooks import CompletionStream, Generator
from slimx.runtime.clocks import Clock
from slimx.runtime.tasks import AnyFuture


def _aborted(pending: Pending) -> SlimxError:
    return SlimxError(
        f"an engine aborted a request on its own after {counted(pending.count, 'token')}; see RUN/logs/engine-*.log"
    )


async def _pieces(stream: CompletionStream, out: asyncio.Future[None]) -> AsyncIterator[Completion]:
    """Yields the pieces of `stream`.

    The gate abandons the stream by cancelling `out`; SlimxError is then raised unless the stream ends within
    `CANCEL_S`.
    """
    pieces = aiter(stream)
    while True:
        piece = asyncio.ensure_future(anext(pieces, None))
        try:
            if out.done():  # abandoned between two reads: the last pieces may have arrived since
                await asyncio.wait({piece}, timeout=CANCEL_S)
            else:
                futures: list[AnyFuture] = [piece, out]
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                raise SlimxError(
                    "an engine did not end an interrupted stream within rollout.interrupt_deadline; see the engines' "
                    "logs for the cause, or raise rollout.interrupt_deadline",
                    code="request.given_up",
                    about="rollout.interrupt_deadline",
                )
        finally:
            if not piece.done():
                piece.cancel()
                await asyncio.wait({piece}, timeout=CANCEL_S)
        completion = piece.result()
        if completion is None:
            return
        yield completion


class Interruptible:
    """Client through which one rollout samples. Its requests wait until the gate is open and a slot is free, and are
    continued after interruptions."""

    def __init__(self, client: Generator, slots: Slots, clock: Clock, gate: Gate, journal: Journal) -> None:
        self._client = client
        self._slots = slots
        self._clock = clock
        self._gate = gate
        self._journal = journal

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples like `GenerationClient.generate`, and continues the completion after interruptions.

        Time spent waiting for the gate to open does not count against the rollout's deadline. Raises SlimxError if the
        engine aborts the request although the gate is open.
        """
        pending = self._begin(request)
        while not pending.done:
            await self._opened()
            task = asyncio.Task(self._request(pending), loop=asyncio.get_running_loop(), eager_start=True)
            async with self._gate.tracked(task):
                await asyncio.wait({task})  # a cancelled rollout stops waiting at once, even if the request continues
                part = None if task.cancelled() else task.result()
                interrupted = self.interrupted
            if part is not None:
                pending.add(part)
                self.record(pending)
            if part is not None and part.finish_reason == "abort" and not interrupted:
                raise _aborted(pending)
        return pending.completion

    async def _request(self, pending: Pending) -> Completion | None:
        """Requests the remainder of the completion and returns it, or None if the gate closed before the request was
        sent."""
        async with self._slots.occupy(self._clock):
            if self._gate.is_open:
                return await self._client.generate(pending.rest())
            return None

    def stream(self, request: GenerationRequest) -> InterruptibleStream:
        """Streams like `GenerationClient.stream`, and continues the stream after interruptions."""
        return InterruptibleStream(self, self._begin(request))

    @asynccontextmanager
    async def segment(
        self, request: GenerationRequest, out: asyncio.Future[None]
    ) -> AsyncIterator[CompletionStream | None]:
        """Waits until the gate is open, then yields a stream of `request`, or None if the gate closed before the
        request was sent.

        `out`: future by which the gate tracks the stream; the gate cancels it to abandon the stream.
        """
        await self._opened()
        async with self._gate.tracked(out), self._slots.occupy(self._clock):
            if not self._gate.is_open:
                yield None
                return
            async with self._client.stream(request) as stream:
                yield stream

    @property
    def interrupted(self) -> bool:
        """True while the gate is closed. Engines then abort requests because of the interruption, not because of a
        failure."""
        return not self._gate.is_open

    def record(self, pending: Pending) -> None:
        """Records the tokens received so far in the rollout's journal, so that a resumed run can continue from them."""
        completion = pending.received
        if completion is None:
            return
        if not pending.done:
            completion = replace(completion, finish_reason="abort")
        self._journal.record(pending.request, completion)

    def _begin(self, request: GenerationRequest) -> Pending:
        return Pending(request, self._journal.replay(request))

    async def _opened(self) -> None:
        if not self._gate.is_open:
            with self._clock.paused():
                await self._gate.opened()


class InterruptibleStream:
    """Stream like `TokenStream` that continues after interruptions. Each continuation is a new request, called a
    segment."""

    def __init__(self, engines: Interruptible, pending: Pending) -> None:
        self._engines = engines
        self._pending = pending
        self._segment = AsyncExitStack()
        self._stream: CompletionStream | None = None
        self._pieces = self._read()

    async def __aenter__(self) -> InterruptibleStream:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pieces.aclose()
        await self._segment.__aexit__(kind, error, trace)
        if error is None and self._pending.received is not None and not self._pending.done:
            self._finish("stop")  # the block was left before the last piece
        self._engines.record(self._pending)

    def __aiter__(self) -> AsyncIterator[Completion]:
        return self._pieces

    @property
    def completion(self) -> Completion:
        """The tokens received so far. Raises SlimxError if there are none."""
        return self._pending.completion

    async def _read(self) -> AsyncGenerator[Completion]:
        pending = self._pending
        if pending.received is not None:  # received by an earlier run
            yield replace(pending.received, routed_experts=None)
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
        """Sets the completion's finish reason and routed experts.

        The last segment's response covers the experts of all tokens, because its prompt includes all earlier ones.
        """
        routes = None
        if self._stream is not None and self._pending.request.routed_experts:
            routes = self._stream.completion.routed_experts
        self._pending.finish(reason, routes)
