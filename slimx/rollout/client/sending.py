"""Sends a request through a router within a deadline, and retries it if its engine is lost or no engine is registered.

The deadline is suspended during an outage, while no engine serves, because an outage is not a failure of the request.
The engines' option `outage_deadline` bounds the duration of an outage.
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
from slimx.errors import DeadlineError, SlimxError, raised
from slimx.json_types import Json
from slimx.runtime.clocks import Clock

NO_ENGINE = 503
"""HTTP status that the router returns if no engine is registered with it."""
UNREACHED = -1
"""Value used in place of an HTTP status when no connection was established and the request was therefore never sent."""

JSON = {"Content-Type": "application/json"}
KEY_HEADER = "X-SMG-Routing-Key"
"""HTTP header with the affinity key; sglang-router's policy `manual` sends requests with the same key to the same
engine."""

REQUEST = "a generation request"
"""Name of the awaited operation, for the DeadlineError that is raised if engines do not respond in time."""

Answer = tuple[int, Json]
"""Status and JSON body of a response. The status is 0 if the connection broke, and UNREACHED if no connection was
established."""


class AnswerError(SlimxError):
    """Raised for an error response if the request cannot be retried, or has been retried too often."""

    def __init__(self, url: str, status: int, message: str):
        outcome = "got no response" if status <= 0 else f"returned status {status}"
        super().__init__(f"POST {url} {outcome}: {message}", code="request.refused", about=url)
        self.url = url
        self.status = status
        self.message = message

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        """Returns the class and the constructor's arguments, with which pickle recreates the error."""
        return type(self), (self.url, self.status, self.message)


def lost(status: int) -> bool:
    """Returns True if `status` means that the request was lost with its engine and another engine may succeed.

    This is the case if the connection broke, the router lost the chosen engine, or the engine failed with a 5xx status.
    """
    return status == 0 or (status >= 500 and status != NO_ENGINE)


def failed(error: aiohttp.ClientError) -> Answer:
    """Returns a status and the text of `error`, in place of a response that did not arrive. The status is UNREACHED if
    no connection was established, else 0."""
    status = UNREACHED if isinstance(error, aiohttp.ClientConnectorError) else 0
    return status, {"text": raised(error)}


def as_logprobs(values: Sequence[float | None] | Sequence[Sequence[float | None]] | np.ndarray, who: str) -> np.ndarray:
    """Converts log-probs from a response of the server `who` to float32, in the shape of `values`.

    Raises SlimxError for NaN and infinity (null in JSON), which mean that the weights are not finite or a GPU computes
    wrong values.
    """
    logprobs = np.array(values, np.float32)
    if not np.isfinite(logprobs).all():
        raise SlimxError(
            f"{who} returned log-probs that are NaN; test the engine's checkpoint with `slimx eval "
            "--checkpoint`, and its GPU with `slimx health`",
            code="answer.nan",
            about=who,
        )
    return logprobs


def input_logprobs(meta: Json, token_ids: Sequence[int], who: str) -> list[float]:
    """Returns the log-probs [L - 1] of `token_ids` [L] except the first, from a /generate response of the server `who`.

    Raises SlimxError for NaN, and if the response scores tokens other than `token_ids`. Id 0 is accepted at every
    position: SGLang 0.5.23 scores the last token of the vocabulary, but reports its id as 0
    (scheduler_components/logprob_result_processor.py clips ids).
    """
    scored = meta.get("input_token_logprobs") or []
    expected = as_ids(token_ids)
    matches = [entry[1] in (token, 0) for entry, token in zip(scored, expected, strict=False)]
    if len(scored) != len(expected) or not all(matches):
        raise SlimxError(
            f"{who} returned log-probs of tokens other than the request's; start the engine with SGLang 0.5.23",
            code="answer.scores",
            about=who,
        )
    return as_logprobs([entry[0] for entry in scored[1:]], who).tolist()


def input_top_logprobs(meta: Json, length: int, top: int, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads from a /generate response the `top` most likely tokens at each of the last `length` positions that the
    server `who` scored.

    Returns their ids, int32 [length, top], and log-probs, float32 [length, top]. Raises SlimxError if the response has
    a different number of positions or tokens.
    """
    rows = (meta.get("input_top_logprobs") or [])[1:]
    if len(rows) != length or any(row is None or len(row) != top for row in rows):
        raise SlimxError(
            f"{who} did not return the {top} most likely tokens at each of {length} "
            "positions; start the engine with SGLang 0.5.23",
            code="answer.top_scores",
            about=who,
        )
    entries = list(chain.from_iterable(rows))
    ids = np.array([entry[1] for entry in entries], np.int32)
    logprobs = as_logprobs([entry[0] for entry in entries], who)
    return ids.reshape(length, top), logprobs.reshape(length, top)


@dataclass(frozen=True, slots=True)
class Resending:
    """Settings for retrying a request."""

    retries: int
    """Maximum number of retries of a request that is lost with its engine."""
    retry_s: float
    """Seconds during which a request is retried while the router has no engine; time during an outage (`absence`) does
    not count."""
    on_lost: Callable[[], Awaitable[None]]
    """Async function that is called before each retry of a lost request; it should remove the lost engine from the
    router."""
    absence: AnyOutage | None
    """Outage that suspends requests and deadlines while it lasts; if None, they are never suspended."""


async def send(attempt: Callable[[], Awaitable[Answer]], url: str, deadline_s: float, rule: Resending) -> Json:
    """Returns the body of the first response with status 200.

    `attempt` sends the request to `url` once; it may be called several times, so the request must have no side effects.
    Raises AnswerError for an error response that is not retried, and DeadlineError after `deadline_s` seconds.
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
    """Sender of one request, and of the requests that continue it after a broken stream, through a router; counts how
    often the request was lost."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, key: str | None, rule: Resending, time: Callable[[], float]
    ) -> None:
        """Stores the settings of the request.

        `key`: affinity key; requests with the same key go to the same engine if `rollout.affinity` is group or rollout.
        `time`: clock in seconds that is suspended while no engine serves.
        """
        self.url = url
        self.time = time
        self._session = session
        self._key = key
        self._rule = rule
        self._losses = 0

    async def answer(self, body: Json, deadline_s: float) -> Json:
        """Sends the request and returns the body of the response. Retries and raises errors like `send`."""
        data = msgspec.json.encode(body)

        async def attempt() -> Answer:
            try:
                async with self._session.post(self.url, data=data, headers=self._headers) as response:
                    return response.status, parse_body(await response.read())
            except aiohttp.ClientError as error:
                return failed(error)

        return await self._send(attempt, deadline_s)

    async def open(self, body: Json, deadline_s: float) -> aiohttp.ClientResponse:
        """Sends the request and returns a response with status 200 whose body is unread; the caller must close it.

        Retries and raises errors like `send`.
        """
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
        """Records that the response broke off, and awaits `on_lost`.

        `event`: description of the failure, for the SlimxError that is raised if the request has been lost more than
        `retries` times.
        """
        if self._losses >= self._rule.retries:
            raise SlimxError(
                f"a request to {self.url} failed in attempt {self._losses + 1}, the last permitted, because {event}; "
                "see the engines' logs",
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
        # An engine that is alive but loses requests stays in the router: a changed key may reach another engine.
        return JSON | {KEY_HEADER: f"{self._key}~{self._losses}"}

    async def _send(self, attempt: Callable[[], Awaitable[Answer]], deadline_s: float) -> Json:
        rule = replace(self._rule, retries=self._rule.retries - self._losses, on_lost=self._count)
        return await send(attempt, self.url, deadline_s, rule)

    async def _count(self) -> None:
        self._losses += 1
        await self._rule.on_lost()
