"""JSON requests of rewards, with a timeout and a limited number of retries."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from slimx.errors import SlimxError
from slimx.extras.http.responses import text_of
from slimx.json_types import Json

FIRST_PAUSE_S = 0.5
"""Pause before the first retry, in seconds. The pause doubles with each retry."""


async def post(url: str, body: Json, *, timeout_s: float, retries: int, headers: dict[str, str] | None = None) -> Any:
    """Posts `body` to `url` and returns the parsed JSON response.

    Requests are retried after lost connections, timeouts and the statuses 429 and 5xx. `timeout_s`: seconds per
    request; `retries`: maximum number of retries. Raises SlimxError with the URL and the last failure."""
    failure = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        for attempt in range(retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with session.post(url, json=body, headers=headers, allow_redirects=False) as response:
                    text = await text_of(response)
                    if response.status == 200:
                        return json.loads(text)
                    failure = f"status {response.status}: {text[:200]}"
                    if response.status != 429 and response.status < 500:
                        break
            except json.JSONDecodeError as error:
                raise SlimxError(
                    f"{url} returned text that is not JSON ({error}); check that this URL is correct and that its "
                    "server responds with JSON",
                    code="reward.server",
                    about=url,
                ) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = f"{type(error).__name__} {error}".strip() + f" (timeout {timeout_s:g} s)"
    raise SlimxError(
        f"{url} returned no reward in the last permitted attempt, number {attempt + 1} ({failure}); check that this "
        "URL is correct and that its server is running",
        code="reward.server",
        about=url,
    )
