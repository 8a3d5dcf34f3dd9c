"""A request whose tokens are read while they are sampled; one that breaks off goes on at another engine.

Sampling is seeded by position, so what another engine samples after the tokens that have come is what the first would
have sampled, if both have the same weights; where they have not, the versions of the tokens say so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np

from slimx.engines.server.wire import message_of, parse_body
from slimx.errors import DeadlineError
from slimx.rollout.client.completion import Completion, Scores
from slimx.rollout.client.reader import Meta, Reader
from slimx.rollout.client.request import GenerationRequest, Pending
from slimx.rollout.client.sending import REQUEST, AnswerError, Sender


class Lines:
    """Lines of a stream of bytes. Every byte is searched once and joined once, however long its line is: the last event
    of an answer brings the experts of all its tokens, tens of megabytes, in one line."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """Chunks of the line that has not ended."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that end in `chunk`, without their ends."""
        *ended, rest = chunk.split(b"\n")
        if ended:
            self._begun.append(ended[0])
            ended[0] = b"".join(self._begun)
            self._begun.clear()
        if rest:
            self._begun.append(rest)
        return ended


PAUSE_S = 0.1
"""Seconds before a stream that broke off is continued."""


class TokenStream:
    """One request. `async with` ends it, iteration gives its pieces, and `completion` all that has come.

        async with client.stream(request) as stream:
            async for piece in stream:
                ...
        draft.add_sampled(stream.completion)

    Who leaves early ends the request at the engine: `completion` then counts as stopped ("stop"), and the experts of
    its tokens are asked for in a request of their own. Iteration raises SlimxError for what the engine refuses and for
    a stream that broke off too often, DeadlineError after the request's deadline.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sender: Sender,
        reader: Reader,
        body: Callable[[GenerationRequest], dict[str, Any]],
        deadline_s: float,
        score: Callable[[Sequence[int]], Awaitable[Scores]],
    ) -> None:
        """`body`: of a request, as if it were none of a stream. `score` brings the experts of given tokens."""
        self._request, self._sender, self._reader, self._body, self._score = request, sender, reader, body, score
        self._pending = Pending(request)
        self._deadline_s, self._counted_from = deadline_s, sender.time()
        self._told = time.monotonic()
        """When the newest piece came."""
        self._finish = ""
        """Why the engine ended the request; "" until it does."""
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
        """All that has come. Raises SlimxError if nothing has."""
        return replace(self._pending.completion, finish_reason=self._finish or "stop", routed_experts=self._routes)

    async def _read(self) -> AsyncIterator[Completion]:
        request = self._request
        while True:
            before, body = self._pending.count, self._body(request) | {"stream": True}
            response = await self._sender.open(body, self._left())
            try:
                async for meta in self._events(response):
                    if (piece := await self._take(meta, request, before)) is not None:
                        yield piece
                    if self._finish:
                        return
                how = "it ended before its last token"
            except aiohttp.ClientError as error:
                how = f"{type(error).__name__}: {error}"
            finally:
                response.close()
            # An engine sends its last token together with the reason why it is the last: the tokens that have come end
            # with no stop token.
            request = self._pending.rest(cut=f"POST {self._sender.url}: a stream broke off ({how})")
            await self._sender.lost(f"a stream broke off after {self._pending.count} tokens ({how})")
            await asyncio.sleep(PAUSE_S)

    def _left(self) -> float:
        """Seconds that remain, without those in which no engine serves; DeadlineError if none do."""
        left = self._deadline_s - (self._sender.time() - self._counted_from)
        if left <= 0:
            raise DeadlineError(REQUEST, self._deadline_s, self._sender.url)
        return left

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[Meta]:
        """`meta_info` of each server-sent event up to the last one."""
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
                    answer = parse_body(data)
                    if "meta_info" not in answer:
                        error = answer.get("error")
                        status = error.get("code") if isinstance(error, dict) else None
                        raise AnswerError(
                            self._sender.url, status if isinstance(status, int) else 200, message_of(answer)
                        )
                    yield answer["meta_info"]

    async def _take(self, meta: Meta, request: GenerationRequest, before: int) -> Completion | None:
        """The piece that an event brings; None if it brings nothing. `request`: of this attempt, before which `before`
        tokens had come."""
        start, now = self._pending.count - before, time.monotonic()
        if meta["completion_tokens"] == start and meta["finish_reason"] is None:
            return None
        piece = self._reader.piece(meta, request, start, now - self._told)
        self._pending.add(replace(piece, finish_reason=""))
        self._told, self._finish = now, piece.finish_reason
        if self._finish and self._reader.routed(request) and (self._finish != "abort" or meta.get("routed_experts")):
            self._routes = await self._reader.experts(meta, len(request.token_ids) + meta["completion_tokens"] - 1)
        return piece
