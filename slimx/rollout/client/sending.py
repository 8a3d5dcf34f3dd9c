"""One request through a router, sent again while engines are lost and come back, within a deadline.

The deadline stands still while no engine serves: that is no failure of a request, and bounded by those who bring one
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import numpy as np

from slimx.data.whole import as_ids
from slimx.engines.outage import Absence
from slimx.engines.server.wire import message_of, parse_body
from slimx.errors import DeadlineError, SlimxError
from slimx.runtime.clocks import Clock

NO_ENGINE = 503
"""The router's answer when no engine is registered."""
UNREACHED = -1
"""Stands in place of a status: nobody listens at the address, so that the request was never sent."""

JSON = {"Content-Type": "application/json"}
KEY_HEADER = "X-SMG-Routing-Key"
"""By which sglang-router's policy `manual` keeps requests together."""

REQUEST = "a generation request"
"""The `awaited` of a DeadlineError where engines did not answer in time."""

Answer = tuple[int, dict[str, Any]]
"""Status and body; status 0 if the connection broke, UNREACHED if there was none."""


class AnswerError(SlimxError):
    """An answer that is final and not the wanted one."""

    def __init__(self, url: str, status: int, message: str):
        said = "was not answered" if status <= 0 else f"answered {status}"
        super().__init__(f"POST {url} {said}: {message}", code="request.refused", about=url)
        self.url, self.status, self.message = url, status, message

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        """Pickle by the fields, as DeadlineError does."""
        return type(self), (self.url, self.status, self.message)


def lost(status: int) -> bool:
    """Returns True if a request was lost with its engine: the connection broke, the router lost the engine it had
    chosen, or the engine failed in a way that another one need not."""
    return status == 0 or (status >= 500 and status != NO_ENGINE)


def failed(error: aiohttp.ClientError) -> Answer:
    """A substitute for the answer of a request that got none: UNREACHED or 0 as its status, and the error's text."""
    status = UNREACHED if isinstance(error, aiohttp.ClientConnectorError) else 0
    return status, {"text": f"{type(error).__name__}: {error}"}


def as_logprobs(values: Sequence[Any], who: str) -> np.ndarray:
    """Log-probs out of an answer of `who`, float32, of the shape of `values`. Raises SlimxError for NaN, which JSON has
    as null: weights that are not finite, or a GPU that computes wrongly."""
    found = np.array(values, np.float32)
    if np.isnan(found).any():
        raise SlimxError(
            f"{who} answered with log-probs that are NaN; check its checkpoint, which slimx eval --checkpoint reads "
            "whole, and its GPU (slimx health)",
            code="answer.nan",
            about=who,
        )
    return found


def input_logprobs(meta: dict[str, Any], token_ids: Sequence[int], who: str) -> list[float]:
    """Log-probs of `token_ids` [L] but the first, out of a /generate answer of `who`, [L - 1].

    Raises SlimxError if other tokens were scored, and for NaN. SGLang 0.5.23 scores the last token of the vocabulary,
    but calls it 0 (scheduler_components/logprob_result_processor.py clips ids)."""
    scored = meta.get("input_token_logprobs") or []
    wanted = as_ids(token_ids)
    if len(scored) != len(wanted) or any(
        entry[1] not in (token, 0) for entry, token in zip(scored, wanted, strict=True)
    ):
        raise SlimxError(
            f"{who} scored {len(scored)} tokens that are not the {len(wanted)} asked for",
            code="answer.scores",
            about=who,
        )
    return as_logprobs([entry[0] for entry in scored[1:]], who).tolist()


def input_top_logprobs(meta: dict[str, Any], length: int, top: int, who: str) -> tuple[np.ndarray, np.ndarray]:
    """The `top` likeliest tokens in the place of each of the last `length` scored ones, out of a /generate answer of
    `who`: int32 [length, top], and their log-probs, float32 [length, top]. Raises SlimxError if there are others."""
    rows = (meta.get("input_top_logprobs") or [])[1:]
    if len(rows) != length or any(row is None or len(row) != top for row in rows):
        raise SlimxError(
            f"{who} gave the likeliest tokens of {len(rows)} places, and not {top} at each of the {length} asked for",
            code="answer.top_scores",
            about=who,
        )
    ids = np.array([[entry[1] for entry in row] for row in rows], np.int32).reshape(length, top)
    return ids, as_logprobs([[entry[0] for entry in row] for row in rows], who).reshape(length, top)


@dataclass(frozen=True, slots=True)
class Resending:
    """The rule by which a request is sent again."""

    retries: int
    """Times that one which was lost with its engine is sent again."""
    retry_s: float
    """Seconds for which one that finds no engine is sent again; those of an absence do not count."""
    on_lost: Callable[[], Awaitable[None]]
    """Awaited before one that was lost is sent again."""
    absence: Absence | None
    """While it lasts requests wait, and no deadline runs."""


async def send(
    attempt: Callable[[], Awaitable[Answer]], url: str, deadline_s: float, rule: Resending
) -> dict[str, Any]:
    """The body of the first answer of status 200. Requests must have no effects besides their answers.

    `attempt` sends the request to `url` once. Raises AnswerError for another answer, and DeadlineError after
    `deadline_s` seconds.
    """
    give_up, pause, lost_before = asyncio.get_running_loop().time() + rule.retry_s, 0.1, 0
    clock, absence = Clock(deadline_s), rule.absence
    try:
        async with clock:
            while True:
                if absence is not None and absence.lasts:
                    began = asyncio.get_running_loop().time()
                    with clock.standing():
                        await absence.over()
                    give_up, pause = give_up + asyncio.get_running_loop().time() - began, 0.1
                status, answer = await attempt()
                if status == 200:
                    return answer
                nobody = status in (NO_ENGINE, UNREACHED)
                if lost(status):
                    again = lost_before < rule.retries
                    lost_before += 1
                else:
                    again = nobody and asyncio.get_running_loop().time() + pause < give_up
                if not again:
                    raise AnswerError(url, status, message_of(answer))
                if not nobody:
                    await rule.on_lost()
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)
    except TimeoutError:
        raise DeadlineError(REQUEST, deadline_s, url) from None


class Sender:
    """Sends one request through a router, its continuations too, and counts how often it was lost."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, key: str | None, rule: Resending, time: Callable[[], float]
    ) -> None:
        """`key`: requests of one key go to one engine, if the router goes by keys. `time`: seconds of a clock that
        stands still while no engine serves."""
        self.url, self.time = url, time
        self._session, self._key, self._rule = session, key, rule
        self._losses = 0

    async def answer(self, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The body of the answer. Errors are those of `send`."""
        data = msgspec.json.encode(body)

        async def attempt() -> Answer:
            try:
                async with self._session.post(self.url, data=data, headers=self._headers) as response:
                    return response.status, parse_body(await response.read())
            except aiohttp.ClientError as error:
                return failed(error)

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
                return failed(error)

        await self._send(attempt, deadline_s)
        return opened[0]

    async def lost(self, what: str) -> None:
        """An open answer broke off: have the engine looked for. Raises SlimxError, which says `what`, if that happened
        too often."""
        if self._losses >= self._rule.retries:
            raise SlimxError(
                f"POST {self.url}: {what}, and it was lost {self._losses} times before",
                code="request.lost",
                about=self.url,
            )
        await self._count()

    @property
    def _headers(self) -> dict[str, str]:
        if self._key is None:
            return JSON
        # An engine that lives on, but loses requests, stays in the router: another key may find another one.
        return JSON | {KEY_HEADER: f"{self._key}~{self._losses}" if self._losses else self._key}

    async def _send(self, attempt: Callable[[], Awaitable[Answer]], deadline_s: float) -> dict[str, Any]:
        left = replace(self._rule, retries=self._rule.retries - self._losses, on_lost=self._count)
        return await send(attempt, self.url, deadline_s, left)

    async def _count(self) -> None:
        self._losses += 1
        await self._rule.on_lost()
