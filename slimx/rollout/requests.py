"""One request through a router, sent again while engines are lost and come back, within a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from slimx.errors import DeadlineError, SlimxError
from slimx.rollout.control import message_of, parse_body

NO_ENGINE = 503
"""The router's answer when no engine is registered."""

JSON = {"Content-Type": "application/json"}
KEY_HEADER = "X-SMG-Routing-Key"
"""By which sglang-router's policy `manual` keeps requests together."""

Answer = tuple[int, dict[str, Any]]
"""Status and body; status 0 if the connection failed."""


class AnswerError(SlimxError):
    """An answer that is final and not the wanted one."""

    def __init__(self, url: str, status: int, message: str):
        super().__init__(f"POST {url} answered {status}: {message}")
        self.url, self.status, self.message = url, status, message

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        """As of DeadlineError."""
        return type(self), (self.url, self.status, self.message)


def lost(status: int, answer: dict[str, Any]) -> bool:
    """Whether a request was lost with its engine: the connection failed, or the router lost the engine it had
    chosen."""
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return status in (0, 502) or (status == 500 and code == "call_upstream_request_error")


def input_logprobs(meta: dict[str, Any], token_ids: Sequence[int], who: str) -> list[float]:
    """Log-probs of `token_ids` [L] but the first, out of a /generate answer of `who`, [L - 1].

    Raises SlimxError if other tokens were scored. SGLang 0.5.23 scores the last token of the vocabulary, but calls it 0
    (scheduler_components/logprob_result_processor.py clips ids)."""
    scored = meta.get("input_token_logprobs") or []
    wanted = [int(token) for token in token_ids]
    if len(scored) != len(wanted) or any(
        entry[1] not in (token, 0) for entry, token in zip(scored, wanted, strict=True)
    ):
        raise SlimxError(f"{who} scored {len(scored)} tokens that are not the {len(wanted)} asked for")
    return [entry[0] for entry in scored[1:]]


async def send(
    attempt: Callable[[], Awaitable[Answer]],
    url: str,
    *,
    deadline_s: float,
    retry_s: float,
    retries: int,
    on_lost: Callable[[], Awaitable[None]],
) -> dict[str, Any]:
    """The body of the first answer of status 200. Requests must have no effects besides their answers.

    `attempt` sends the request to `url` once. One that is lost with its engine is sent again `retries` times, one that
    finds no engine for `retry_s` seconds; `on_lost` is awaited before the first is.
    Raises AnswerError for another answer, and DeadlineError after `deadline_s` seconds.
    """
    give_up, pause, lost_before = time.monotonic() + retry_s, 0.1, 0
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                status, answer = await attempt()
                if status == 200:
                    return answer
                if lost(status, answer):
                    again = lost_before < retries
                    lost_before += 1
                else:
                    again = status == NO_ENGINE and time.monotonic() + pause < give_up
                if not again:
                    raise AnswerError(url, status, message_of(answer))
                if status != NO_ENGINE:
                    await on_lost()
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)
    except TimeoutError:
        raise DeadlineError("a generation request", deadline_s, url) from None


class Sender:
    """Sends one request through a router, its continuations too, and counts how often it was lost."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        key: str | None,
        *,
        retry_s: float,
        retries: int,
        on_lost: Callable[[], Awaitable[None]],
    ) -> None:
        """`key`: requests of one key go to one engine, if the router goes by keys. The others are those of `send`."""
        self.url = url
        self._session, self._key, self._retry_s, self._retries, self._on_lost = session, key, retry_s, retries, on_lost
        self._losses = 0

    async def answer(self, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The body of the answer. Errors are those of `send`."""
        data = msgspec.json.encode(body)

        async def attempt() -> Answer:
            try:
                async with self._session.post(self.url, data=data, headers=self._headers) as response:
                    return response.status, parse_body(await response.read())
            except aiohttp.ClientError as error:
                return 0, {"text": f"{type(error).__name__}: {error}"}

        return await self._send(attempt, deadline_s)

    async def open(self, body: dict[str, Any], deadline_s: float) -> aiohttp.ClientResponse:
        """An answer of status 200 whose body is yet to be read; the caller closes it. Errors are those of `send`."""
        data = msgspec.json.encode(body)
        opened: list[aiohttp.ClientResponse] = []

        async def attempt() -> Answer:
            try:
                response = await self._session.post(self.url, data=data, headers=self._headers)
                if response.status == 200:
                    opened.append(response)
                    return 200, {}
                async with response:
                    return response.status, parse_body(await response.text())
            except aiohttp.ClientError as error:
                return 0, {"text": f"{type(error).__name__}: {error}"}

        await self._send(attempt, deadline_s)
        return opened[0]

    async def lost(self, what: str) -> None:
        """An open answer broke off: have the engine looked for. Raises SlimxError, which says `what`, if that happened
        too often."""
        if self._losses >= self._retries:
            raise SlimxError(f"POST {self.url}: {what}, and it was lost {self._losses} times before")
        await self._count()

    @property
    def _headers(self) -> dict[str, str]:
        if self._key is None:
            return JSON
        # An engine that lives on, but loses requests, stays in the router: another key may find another one.
        return JSON | {KEY_HEADER: f"{self._key}~{self._losses}" if self._losses else self._key}

    async def _send(self, attempt: Callable[[], Awaitable[Answer]], deadline_s: float) -> dict[str, Any]:
        return await send(
            attempt,
            self.url,
            deadline_s=deadline_s,
            retry_s=self._retry_s,
            retries=self._retries - self._losses,
            on_lost=self._count,
        )

    async def _count(self) -> None:
        self._losses += 1
        await self._on_lost()
