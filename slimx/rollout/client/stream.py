"""A request whose tokens are read while they are sampled; one that breaks off goes on at another engine.

Sampling is seeded by position, so what another engine samples after the tokens that have come is what the first would
have sampled, if both have the same weights; where they have not, the versions of the tokens say so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import aiohttp

from slimx.engines.server.control import message_of
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout.client.completion import Asked, Completion, Reader, Scores, spans_of
from slimx.rollout.client.requests import AnswerError, Sender

Meta = dict[str, Any]
PER_TOKEN = ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs")
"""Lists in `meta_info` with an entry for each sampled token."""
PAUSE_S = 0.1
"""Seconds before a stream that broke off is continued."""


class TokenStream:
    """One request. `async with` ends it, iteration gives its pieces, and `completion` all that has come.

        async with client.stream(token_ids, sampling, seed) as stream:
            async for piece in stream:
                ...
        draft.add_sampled(stream.completion)

    Who leaves early ends the request at the engine: `completion` then counts as stopped ("stop"), and the experts of
    its tokens are asked for in a request of their own. Iteration raises SlimxError for what the engine refuses and for
    a stream that broke off too often, DeadlineError after the request's deadline.
    """

    def __init__(
        self,
        sender: Sender,
        reader: Reader,
        body: dict[str, Any],
        asked: Asked,
        deadline_s: float,
        score: Callable[[Sequence[int]], Awaitable[Scores]],
    ) -> None:
        """`body`: of the request, as if it were none of a stream. `score` brings the experts of given tokens."""
        self._sender, self._reader, self._body, self._asked, self._score = sender, reader, body, asked, score
        self._deadline_s = deadline_s
        self._began, self._counted_from = time.monotonic(), sender.time()
        self._sampled: dict[str, list[Any]] = {name: [] for name in PER_TOKEN}
        self._spans: list[Meta] = []
        """Of the tokens that have come."""
        self._last: Meta | None = None
        """The newest `meta_info`."""
        self._routes: Any = None
        self._done = False
        self._pieces = self._read()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pieces.aclose()
        if error is None and not self._done and self._asked.routed and self._count:
            self._routes = (await self._score(self._body["input_ids"] + self._ids)).routed_experts

    def __aiter__(self) -> AsyncIterator[Completion]:
        return self._pieces

    @property
    def completion(self) -> Completion:
        """All that has come. Raises SlimxError if nothing has."""
        if self._last is None:
            raise SlimxError("a stream was left before its first token; read a piece of it first")
        meta = {**self._last, **self._sampled, "weight_versions": self._spans}
        if self._done:
            return self._reader.completion(meta, self._asked, self._seconds)
        whole = self._reader.completion(meta, replace(self._asked, routed=False), self._seconds)
        return replace(whole, finish_reason="stop", routed_experts=self._routes)

    @property
    def _count(self) -> int:
        return len(self._sampled["output_token_logprobs"])

    @property
    def _ids(self) -> list[int]:
        return [entry[1] for entry in self._sampled["output_token_logprobs"]]

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    async def _read(self) -> AsyncIterator[Completion]:
        while not self._done:
            before, earlier = self._count, list(self._spans)
            response = await self._sender.open(self._continuation(), self._left())
            try:
                async for meta in self._events(response):
                    if (piece := self._take(meta, before, earlier)) is not None:
                        yield piece
                    if self._done:
                        return
            except aiohttp.ClientError as error:
                await self._broken(f"{type(error).__name__}: {error}")
            else:
                await self._broken("it ended before its last token")
            finally:
                response.close()

    def _left(self) -> float:
        """Seconds that remain, without those in which no engine serves; DeadlineError if none do."""
        left = self._deadline_s - (self._sender.time() - self._counted_from)
        if left <= 0:
            raise DeadlineError("a generation request", self._deadline_s, self._sender.url)
        return left

    def _continuation(self) -> dict[str, Any]:
        """The request for what has not come yet. An engine sends its last token together with the reason why it is the
        last: the tokens that have come end with no stop token."""
        sampling, come = dict(self._body["sampling_params"]), self._count
        for name in ("max_new_tokens", "min_new_tokens"):
            if name in sampling:
                sampling[name] = max(sampling[name] - come, 0)
        ids = self._body["input_ids"] + self._ids
        return self._body | {"input_ids": ids, "sampling_params": sampling, "stream": True}

    async def _broken(self, how: str) -> None:
        come = self._count
        what = f"a stream broke off after {come} tokens ({how})"
        if come and self._body["sampling_params"].get("stop"):
            raise SlimxError(
                f"POST {self._sender.url}: {what}; it is not continued, as a stop string may have begun in them"
            )
        await self._sender.lost(what)
        await asyncio.sleep(PAUSE_S)

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[Meta]:
        """`meta_info` of each server-sent event up to the last one."""
        buffer = b""
        while True:
            left = self._left()
            try:
                async with asyncio.timeout(left):
                    chunk = await response.content.readany()
            except TimeoutError:
                raise DeadlineError("a generation request", self._deadline_s, self._sender.url) from None
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    answer = json.loads(data)
                    if "meta_info" not in answer:
                        error = answer.get("error")
                        status = error.get("code") if isinstance(error, dict) else None
                        raise AnswerError(
                            self._sender.url, status if isinstance(status, int) else 200, message_of(answer)
                        )
                    yield answer["meta_info"]

    def _take(self, meta: Meta, before: int, earlier: list[Meta]) -> Completion | None:
        """The piece that an event brings; None if it brings nothing. `before`: tokens that came before this attempt,
        with the spans `earlier`."""
        start = self._count
        total = before + meta["completion_tokens"]
        new = total - start
        for name, sampled in self._sampled.items():
            # Of all tokens of the attempt, or of the new ones alone (--incremental-streaming-output).
            sampled += (meta.get(name) or [])[-new:] if new else []
        if self._count != total:
            raise SlimxError(f"POST {self._sender.url} streamed {total} tokens, but log-probs of {self._count}")
        shifted = [
            {**span, "start": span["start"] + before, "end": span["end"] + before}
            for span in spans_of(meta, total - before)
        ]
        self._spans, self._last, self._done = _joined(earlier + shifted), meta, meta["finish_reason"] is not None
        if not new and not self._done:
            return None
        spans = [
            {**span, "start": max(span["start"] - start, 0), "end": min(span["end"], total) - start}
            for span in self._spans
        ]
        piece = {
            **meta,
            **{name: sampled[start:] for name, sampled in self._sampled.items()},
            "weight_versions": [span for span in spans if span["end"] > span["start"]],
            "finish_reason": meta["finish_reason"] or {"type": ""},
        }
        return self._reader.completion(piece, replace(self._asked, routed=False), self._seconds)


def _joined(spans: Sequence[Meta]) -> list[Meta]:
    """Neighbours of one version are one span."""
    out: list[Meta] = []
    for span in spans:
        if out and out[-1]["version"] == span["version"]:
            out[-1] = {**out[-1], "end": span["end"]}
        else:
            out.append(span)
    return out
