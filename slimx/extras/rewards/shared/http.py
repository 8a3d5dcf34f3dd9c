"""Requests that rewards make: one JSON answer, with a deadline and bounded retries."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from slimx.errors import SlimxError
from slimx.extras.http.answers import text_of

FIRST_PAUSE_S = 0.5
"""Before the first retry; each further one waits twice as long."""


async def post(
    url: str, body: dict[str, Any], *, timeout_s: float, retries: int, headers: dict[str, str] | None = None
) -> Any:
    """The JSON that `url` answers to `body`. Lost connections, time-outs and statuses 429 and 5xx are tried again.

    Raises SlimxError with the address and what was wrong with the last answer."""
    wrong = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        for attempt in range(retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with session.post(url, json=body, headers=headers, allow_redirects=False) as response:
                    text = await text_of(response)
                    if response.status == 200:
                        return json.loads(text)
                    wrong = f"status {response.status}: {text[:200]}"
                    if response.status != 429 and response.status < 500:
                        break
            except json.JSONDecodeError as error:
                raise SlimxError(
                    f"{url} answered no JSON ({error}); is it the address of the reward?",
                    code="reward.server",
                    about=url,
                ) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                wrong = f"{type(error).__name__} {error}".strip() + f" (timeout {timeout_s:g} s)"
    raise SlimxError(
        f"{url} gave no reward after {attempt + 1} requests, last {wrong}; is the server up?",
        code="reward.server",
        about=url,
    )
