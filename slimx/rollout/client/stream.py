"""A request whose tokens can be read while they are sampled; if its stream breaks, another engine continues it.

Sampling is seeded by position, so an engine with the same weights continues with the tokens that the first engine would
have sampled. If the other engine has different weights, the versions of the tokens show it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType

import aiohttp
import numpy as np

from slimx.engines.server.http_calls import message_of, parse_body
from slimx.errors import DeadlineError, counted, raised
from slimx.json_types import Json
from slimx.rollout.client.completion import Completion, Scores
from slimx.rollout.client.reader import Meta, Reader
from slimx.rollout.client.request import GenerationRequest, Pending
from slimx.rollout.client.sending import REQUEST, AnswerError, RequestSender


class Lines:
    """Splitter of a byte stream into lines, in linear time.

    Every byte is searched and copied only once, because lines can be long: the last event of a response contains the
    experts of all tokens, tens of megabytes in one line.
    """

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        """Chunks of the line whose end has not arrived."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the lines that end in `chunk`, without their newline characters."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            self._chunks.append(lines[0])
            lines[0] = b"".join(self._chunks)
            self._chunks.clear()
        if rest:
            self._chunks.append(rest)
        return lines


PAUSE_S = 0.1
"""Pause in seconds before a broken stream is continued."""


class TokenStream:
    """One streamed request, which `async with` closes. Iteration yields pieces; `completion` contains all tokens so
    far.

        async with client.stream(request) as stream:
            async for piece in stream:
                ...
        draft.add_sampled(stream.completion)

    Leaving the block early stops the request at the engine: `completion` then has the finish reason "stop", and the
    routed experts of its tokens are computed by a second request. Iteration raises SlimxError if the engine refuses the
    request or the stream breaks too often, and DeadlineError after the request's deadline.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sender: RequestSender,
        reader: Reader,
        body: Callable[[GenerationRequest], Json],
        deadline_s: float,
        score: Callable[[Sequence[int]], Awaitable[Scores]],
    ) -> None:
        """Prepares the request without sending it.

        `body`: function that returns the JSON body of the equivalent non-streaming request. `deadline_s`: time limit of
        the request in seconds. `score`: function that returns the log-probs and routed experts of given tokens.
        """
        self._request = request
        self._sender = sender
        self._reader = reader
        self._body = body
        self._score = score
        self._pending = Pending(request)
        self._deadline_s = deadline_s
        self._started = sender.time()
        self._last_piece = time.monotonic()
        """Time at which the last piece was received, by `time.monotonic()`."""
        self._finish = ""
        """Finish reason that the engine returned; "" until then."""
        self._routes: np.ndarray | None = None
        self._pieces = self._read()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pieces.aclose()
        if error is None and not self._finish and self._reader.routed(self._request) and self._pending.count:
            ids = [*self._request.token_ids, *self._pending.completion.token_ids.tolist()]
            self._routes = (await self._score(ids)).routed_experts

    def __aiter__(self) -> AsyncIterator[Completion]:
        return self._pieces

    @property
    def completion(self) -> Completion:
        """The tokens received so far. Raises SlimxError if there are none."""
        return replace(self._pending.completion, finish_reason=self._finish or "stop", routed_experts=self._routes)

    async def _read(self) -> AsyncGenerator[Completion]:
        request = self._request
        while True:
            before = self._pending.count
            response = await self._sender.open(self._body(request) | {"stream": True}, self._left())
            try:
                async for meta in self._events(response):
                    piece = await self._take(meta, request, before)
                    if piece is not None:
                        yield piece
                    if self._finish:
                        return
                cause = "it ended before its last token"
            except aiohttp.ClientError as error:
                cause = raised(error)
            finally:
                response.close()
            # Engines send the last token with the finish reason, so the received tokens contain no stop token.
            request = self._pending.rest(cut=f"POST {self._sender.url}: a stream broke off ({cause})")
            await self._sender.lost(f"a stream broke off after {counted(self._pending.count, 'token')} ({cause})")
            await asyncio.sleep(PAUSE_S)

    def _left(self) -> float:
        """Returns the seconds until the deadline, outages excluded. Raises DeadlineError if none remain."""
        left = self._deadline_s - (self._sender.time() - self._started)
        if left <= 0:
            raise DeadlineError(REQUEST, self._deadline_s, self._sender.url)
        return left

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[Meta]:
        """Yields the `meta_info` of each server-sent event, including the last one."""
        lines = Lines()
        while True:
            left = self._left()
            try:
                async with asyncio.timeout(left):
                    chunk = await response.content.readany()
            except TimeoutError:
                raise DeadlineError(REQUEST, self._deadline_s, self._sender.url) from None
            if not chunk:
                return
            for line in lines.feed(chunk):
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    event = parse_body(data)
                    if "meta_info" not in event:
                        raise AnswerError(self._sender.url, _status(event), message_of(event))
                    yield event["meta_info"]

    async def _take(self, meta: Meta, request: GenerationRequest, before: int) -> Completion | None:
        """Returns the new tokens of a server-sent event as a piece of the completion, or None if the event has neither
        new tokens nor a finish reason.

        `request`: request whose response contains the event. `before`: number of tokens received before that request
        was sent.
        """
        start = self._pending.count - before
        now = time.monotonic()
        if meta["completion_tokens"] == start and meta["finish_reason"] is None:
            return None
        piece = self._reader.piece(meta, request, start, now - self._last_piece)
        self._pending.add(replace(piece, finish_reason=""))
        self._last_piece = now
        self._finish = piece.finish_reason
        if self._finish and self._reader.routed(request) and (self._finish != "abort" or meta.get("routed_experts")):
            self._routes = await self._reader.experts(meta, len(request.token_ids) + meta["completion_tokens"] - 1)
        return piece


def _status(event: Json) -> int:
    """Returns the HTTP status in a stream's error event; 200 if the event contains none."""
    error = event.get("error")
    status = error.get("code") if isinstance(error, dict) else None
    return status if isinstance(status, int) else 200
