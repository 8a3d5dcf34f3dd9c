"""HTTP requests to engines and routers, and the bodies of their answers, read alike whoever asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from slimx.errors import DeadlineError, SlimxError

Json = dict[str, Any]


async def request(
    method: str, url: str, body: Json | None = None, *, deadline_s: float, headers: Mapping[str, str], who: str
) -> tuple[int, Json]:
    """Status and body of the answer to one request. Raises DeadlineError, or SlimxError where nothing answers, naming
    `who` is asked."""
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request(method, url, json=body) as response,
        ):
            return response.status, parse_body(await response.read())
    except TimeoutError:
        raise DeadlineError(f"{method} {url}", deadline_s, who) from None
    except aiohttp.ClientError as error:
        raise SlimxError(
            f"{who}: {method} {url} failed: {type(error).__name__}: {error}", code="http.unreachable", about=url
        ) from None


def parse_body(body: str | bytes) -> Json:
    """A JSON object as it is; anything else under "text". By msgspec, as an answer brings a few numbers for every
    token."""
    try:
        value = msgspec.json.decode(body)
    except ValueError:  # msgspec's own errors are among these, and bytes that are no UTF-8
        value = None
    if isinstance(value, dict):
        return value
    return {"text": body if isinstance(body, str) else body.decode(errors="replace")}


def message_of(answer: Json) -> str:
    """The server's words in a failed answer, wherever it put them."""
    error = answer.get("error", answer.get("message", answer.get("text", "")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error or "no message")[:2000]
