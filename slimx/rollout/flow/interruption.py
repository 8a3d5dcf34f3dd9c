"""Requests that stop in the middle and go on later: partial rollouts, and saves that lose no token.

While the gate is closed no request of a rollout is with an engine. One that was out when it closed is aborted by its
engine and brings what it has; when the gate opens again, the tokens so far are sent once more and the rest is sampled,
perhaps by another weight version. The hook that asked sees one completion. Since a token's random number depends on
seed and position alone, a completion that was cut in two under one version has the tokens of a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from slimx.errors import SlimxError
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.stream import TokenStream
from slimx.rollout.flow.gate import CANCEL_S, Gate
from slimx.rollout.flow.progress import Journal, join, key_of
from slimx.rollout.flow.slots import Slots
from slimx.rollout.hooks import Generator
from slimx.runtime.standing_clock import Clock


@dataclass(slots=True)
class Pending:
    """One completion in the making."""

    prompt: np.ndarray
    """int32: what is to be continued."""
    sampling: dict[str, Any]
    seed: int
    routed: bool
    have: Completion | None
    """What came so far."""
    streamed: bool = False
    """Whether the hook has seen it already."""

    @property
    def done(self) -> bool:
        return self.have is not None and self.have.finish_reason != "abort"

    def rest(self) -> tuple[list[int], dict[str, Any], int, bool]:
        """The request for what is missing, as `Generator.generate` takes it."""
        if self.have is None:
            return self.prompt.tolist(), self.sampling, self.seed, self.routed
        ids, count = self.have.token_ids.tolist(), len(self.have.token_ids)
        less = {
            name: max(0, self.sampling[name] - count)
            for name in ("max_new_tokens", "min_new_tokens")
            if name in self.sampling
        }
        return self.prompt.tolist() + ids, {**self.sampling, **less}, self.seed, self.routed

    def add(self, part: Completion) -> None:
        """What came in addition."""
        cut = part.finish_reason == "abort"
        if cut and (len(part.token_ids) == 0 or (self.sampling.get("stop") and not self.streamed)):
            return  # a stop string may have begun in the last tokens, and the next request could not see it whole
        self.have = part if self.have is None else join(self.have, part, len(self.prompt))
        if cut and not self.streamed and len(self.have.token_ids) == self.sampling.get("max_new_tokens"):
            self.have = replace(self.have, finish_reason="length")  # it was the last token that there could be


def _aborted(pending: Pending) -> SlimxError:
    count = 0 if pending.have is None else len(pending.have.token_ids)
    return SlimxError(f"a request was aborted by the engine after {count} tokens; its log says why")


async def _pieces(stream: TokenStream, out: asyncio.Future[None]) -> AsyncIterator[Completion]:
    """What `stream` brings. Raises SlimxError once the gate has given it up, by cancelling `out`."""
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
                    "engine's log says why"
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

    async def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any], seed: int, return_routed_experts: bool = False
    ) -> Completion:
        """As `GenerationClient.generate`. Time before a closed gate does not count against the rollout's deadline.
        Raises SlimxError if the engine aborts a request by itself."""
        pending, key = self._begin(token_ids, sampling, seed, return_routed_experts)
        while not pending.done:
            await self._opened()
            request = asyncio.ensure_future(self._ask(pending))
            async with self._gate.letting_out(request):
                await asyncio.wait({request})  # which a cancelled rollout leaves at once, whatever the request does
                part = None if request.cancelled() else request.result()
                interrupted = not self._gate.is_open
            if part is not None:
                pending.add(part)
                self.record(key, pending)
            if part is not None and part.finish_reason == "abort" and not interrupted:
                raise _aborted(pending)
        return pending.have

    async def _ask(self, pending: Pending) -> Completion | None:
        """The rest; None if the gate closed before it was asked for."""
        async with self._slots.one(self._clock):
            return await self._client.generate(*pending.rest()) if self._gate.is_open else None

    def stream(
        self, token_ids: Sequence[int], sampling: dict[str, Any], seed: int, return_routed_experts: bool = False
    ) -> InterruptibleStream:
        """As `GenerationClient.stream`."""
        pending, key = self._begin(token_ids, sampling, seed, return_routed_experts)
        pending.streamed = True
        return InterruptibleStream(self, pending, key)

    @asynccontextmanager
    async def segment(self, pending: Pending, out: asyncio.Future[None]) -> AsyncIterator[TokenStream | None]:
        """A stream of the rest; None if the gate closed before it was asked for. `out` is cancelled if the gate gives
        the stream up."""
        await self._opened()
        async with self._gate.letting_out(out), self._slots.one(self._clock):
            if not self._gate.is_open:
                yield None
                return
            async with self._client.stream(*pending.rest()) as stream:
                yield stream

    @property
    def interrupted(self) -> bool:
        """Whether an abort now is the gate's doing."""
        return not self._gate.is_open

    def record(self, key: str, pending: Pending) -> None:
        """Keep what came so far."""
        if pending.have is not None:
            self._journal.record(key, pending.prompt, pending.have)

    def _begin(
        self, token_ids: Sequence[int], sampling: dict[str, Any], seed: int, routed: bool
    ) -> tuple[Pending, str]:
        prompt = np.array(token_ids, np.int32)
        key = key_of(prompt, sampling, seed)
        return Pending(prompt, sampling, seed, routed, self._journal.replay(key)), key

    async def _opened(self) -> None:
        if not self._gate.is_open:
            with self._clock.standing():
                await self._gate.opened()


class InterruptibleStream:
    """A `TokenStream` in as many segments as it is interrupted times; used as one."""

    def __init__(self, engines: Interruptible, pending: Pending, key: str) -> None:
        self._engines, self._pending, self._key = engines, pending, key
        self._segment, self._stream = AsyncExitStack(), None
        self._pieces = self._read()

    async def __aenter__(self) -> InterruptibleStream:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pieces.aclose()
        await self._segment.__aexit__(kind, error, trace)
        if error is None and self._pending.have is not None and not self._pending.done:
            self._end("stop")  # it was left early
        self._engines.record(self._key, self._pending)

    def __aiter__(self) -> AsyncIterator[Completion]:
        return self._pieces

    @property
    def completion(self) -> Completion:
        """All that has come. Raises SlimxError if nothing has."""
        if self._pending.have is None:
            raise SlimxError("a stream was left before its first token; read a piece of it first")
        return self._pending.have

    async def _read(self) -> AsyncIterator[Completion]:
        if self._pending.have is not None:  # of an earlier run
            yield replace(self._pending.have, routed_experts=None)
        while not self._pending.done:
            out: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stream = await self._segment.enter_async_context(self._engines.segment(self._pending, out))
            interrupted = self._stream is None
            if self._stream is not None:
                async for piece in _pieces(self._stream, out):
                    interrupted = piece.finish_reason == "abort" and self._engines.interrupted
                    if piece.finish_reason == "abort" and not interrupted:
                        raise _aborted(self._pending)
                    last = bool(piece.finish_reason) and not interrupted
                    self._pending.add(replace(piece, finish_reason="abort"))
                    if last:
                        self._end(piece.finish_reason)
                    if last or len(piece.token_ids):
                        yield piece if last else replace(piece, finish_reason="")
            await self._segment.aclose()
            if not interrupted:
                return
            if self._pending.have is not None and self._pending.sampling.get("stop"):
                raise SlimxError(
                    "a stream was interrupted and is not continued, as a stop string may have begun in it; use "
                    "stop_token_ids, or engine.generate in place of engine.stream"
                )
            self._engines.record(self._key, self._pending)

    def _end(self, reason: str) -> None:
        """The last segment was sent all tokens before its own, and brings the experts of these too."""
        routes = self._stream.completion.routed_experts if self._stream is not None and self._pending.routed else None
        self._pending.have = replace(self._pending.have, finish_reason=reason, routed_experts=routes)
