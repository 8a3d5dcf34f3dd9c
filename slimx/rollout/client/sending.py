"""Sends a request through a router, with repetitions while engines are lost and come back, within a deadline.

The deadline is suspended while no engine serves: an outage is not a failure of the request, and its duration is bounded
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import aiohttp
import msgspec
import numpy as np

from slimx.data.integers import as_ids
from slimx.engines.outage import AnyOutage
from slimx.engines.server.http_calls import message_of, parse_body
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.runtime.clocks import Clock

NO_ENGINE = 503
"""The router's status if no engine is registered."""
UNREACHED = -1
"""Pseudo-status: the connection was refused, so the request was never sent."""

JSON = {"Content-Type": "application/json"}
KEY_HEADER = "X-SMG-Routing-Key"
"""Header by which sglang-router's policy `manual` keeps requests together."""

REQUEST = "a generation request"
"""`awaited` of a DeadlineError if engines do not respond in time."""

Answer = tuple[int, Json]
"""Status and body of a response; status 0 if the connection broke, UNREACHED if there was none."""


class AnswerError(SlimxError):
    """A final response with an error."""

    def __init__(self, url: str, status: int, message: str):
        outcome = "was not answered" if status <= 0 else f"answered {status}"
        super().__init__(f"POST {url} {outcome}: {message}", code="request.refused", about=url)
        self.url = url
        self.status = status
        self.message = message

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        """Returns the fields for pickling, like DeadlineError."""
        return type(self), (self.url, self.status, self.message)


def lost(status: int) -> bool:
    """Returns True if a request was lost with its engine: the connection broke, the router lost the chosen engine, or
    the engine failed in a way in which another one need not."""
    return status == 0 or (status >= 500 and status != NO_ENGINE)


def failed(error: aiohttp.ClientError) -> Answer:
    """Returns a substitute for a missing response: status UNREACHED or 0, and the error's text."""
    status = UNREACHED if isinstance(error, aiohttp.ClientConnectorError) else 0
    return status, {"text": f"{type(error).__name__}: {error}"}


def as_logprobs(values: Sequence[float | None] | Sequence[Sequence[float | None]], who: str) -> np.ndarray:
    """Converts log-probs from a response of `who` to float32, in the shape of `values`. Raises SlimxError for NaN (null
    in JSON): the weights are not finite or a GPU computes wrong values."""
    logprobs = np.array(values, np.float32)
    if np.isnan(logprobs).any():
        raise SlimxError(
            f"{who} answered with log-probs that are NaN; check its checkpoint (slimx eval --checkpoint) and its GPU "
            "(slimx health)",
            code="answer.nan",
            about=who,
        )
    return logprobs


def input_logprobs(meta: Json, token_ids: Sequence[int], who: str) -> list[float]:
    """Returns the log-probs [L - 1] of `token_ids` [L] except the first, from a /generate response of `who`.

    Raises SlimxError if other tokens were scored, and for NaN. SGLang 0.5.23 scores the last token of the vocabulary,
    but reports its id as 0 (scheduler_components/logprob_result_processor.py clips ids).
    """
    scored = meta.get("input_token_logprobs") or []
    expected = as_ids(token_ids)
    matches = [entry[1] in (token, 0) for entry, token in zip(scored, expected, strict=False)]
    if len(scored) != len(expected) or not all(matches):
        raise SlimxError(
            f"{who} scored {len(scored)} tokens that are not the {len(expected)} requested ones",
            code="answer.scores",
            about=who,
        )
    return as_logprobs([entry[0] for entry in scored[1:]], who).tolist()


def input_top_logprobs(meta: Json, length: int, top: int, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `top` most likely token ids at each of the last `length` scored positions, int32 [length, top], and
    their log-probs, float32 [length, top], from a /generate response of `who`. Raises SlimxError for another shape."""
    rows = (meta.get("input_top_logprobs") or [])[1:]
    if len(rows) != length or any(row is None or len(row) != top for row in rows):
        raise SlimxError(
            f"{who} returned top tokens for {len(rows)} positions, instead of {top} for each of the {length} requested",
            code="answer.top_scores",
            about=who,
        )
    entries = list(chain.from_iterable(rows))
    ids = np.array([entry[1] for entry in entries], np.int32)
    logprobs = as_logprobs([entry[0] for entry in entries], who)
    return ids.reshape(length, top), logprobs.reshape(length, top)


@dataclass(frozen=True, slots=True)
class Resending:
    """The rule for repeating a request."""

    retries: int
    """Number of repetitions of a request that was lost with its engine."""
    retry_s: float
    """Seconds during which a request without any engine is repeated, outages excluded."""
    on_lost: Callable[[], Awaitable[None]]
    """Awaited before a lost request is repeated."""
    absence: AnyOutage | None
    """While it lasts, requests wait and deadlines are suspended."""


async def send(attempt: Callable[[], Awaitable[Answer]], url: str, deadline_s: float, rule: Resending) -> Json:
    """Returns the body of the first response with status 200. Requests must have no side effects.

    `attempt` sends the request to `url` once. Raises AnswerError for another final response, DeadlineError after
    `deadline_s` seconds.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + rule.retry_s
    pause = 0.1
    losses = 0
    clock = Clock(deadline_s)
    absence = rule.absence
    try:
        async with clock:
            while True:
                if absence is not None and absence.lasts:
                    began = loop.time()
                    with clock.paused():
                        await absence.wait_until_over()
                    give_up_at += loop.time() - began
                    pause = 0.1
                status, response = await attempt()
                if status == 200:
                    return response
                no_engine = status in (NO_ENGINE, UNREACHED)
                if lost(status):
                    again = losses < rule.retries
                    losses += 1
                else:
                    again = no_engine and loop.time() + pause < give_up_at
                if not again:
                    raise AnswerError(url, status, message_of(response))
                if not no_engine:
                    await rule.on_lost()
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)
    except TimeoutError:
        raise DeadlineError(REQUEST, deadline_s, url) from None


class RequestSender:
    """Sends one request and its continuations through a router, and counts how often it was lost."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, key: str | None, rule: Resending, time: Callable[[], float]
    ) -> None:
        """Prepares the sender. `key`: requests with the same key go to the same engine if the router routes by keys.
        `time`: clock in seconds that is suspended while no engine serves."""
        self.url = url
        self.time = time
        self._session = session
        self._key = key
        self._rule = rule
        self._losses = 0

    async def answer(self, body: Json, deadline_s: float) -> Json:
        """Returns the body of the response. Raises like `send`."""
        data = msgspec.json.encode(body)

        async def attempt() -> Answer:
            try:
                async with self._session.post(self.url, data=data, headers=self._headers) as response:
                    return response.status, parse_body(await response.read())
            except aiohttp.ClientError as error:
                return failed(error)

        return await self._send(attempt, deadline_s)

    async def open(self, body: Json, deadline_s: float) -> aiohttp.ClientResponse:
        """Returns a response of status 200 with an unread body, to be closed by the caller. Raises like `send`."""
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
                return failed(error)

        await self._send(attempt, deadline_s)
        return opened[0]

    async def lost(self, event: str) -> None:
        """Reports a response that broke off to the owner of the engines. Raises SlimxError with `event` if that
        happened too often."""
        if self._losses >= self._rule.retries:
            raise SlimxError(
                f"POST {self.url}: {event}, and it was lost {self._losses} times before",
                code="request.lost",
                about=self.url,
            )
        await self._count()

    @property
    def _headers(self) -> dict[str, str]:
        if self._key is None:
            return JSON
        if not self._losses:
            return JSON | {KEY_HEADER: self._key}
        # An engine that is alive but loses requests stays in the router: another key may reach another engine.
        return JSON | {KEY_HEADER: f"{self._key}~{self._losses}"}

    async def _send(self, attempt: Callable[[], Awaitable[Answer]], deadline_s: float) -> Json:
        rule = replace(self._rule, retries=self._rule.retries - self._losses, on_lost=self._count)
        return await send(attempt, self.url, deadline_s, rule)

    async def _count(self) -> None:
        self._losses += 1
        await self._rule.on_lost()
