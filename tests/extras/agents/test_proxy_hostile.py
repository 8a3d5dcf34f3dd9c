"""Requests that would hold up the proxy are refused before they do."""

from __future__ import annotations

import json

import aiohttp
import pytest
from openai import BadRequestError

from slimx.rollout.hooks import GivenUp
from tests.extras.agents.proxy_stand import PROMPT, Script, ask, rollout


async def refusal(client, messages=PROMPT.messages, **options) -> tuple[str, str]:
    with pytest.raises(BadRequestError) as caught:
        await ask(client, messages, **options)
    return caught.value.code, caught.value.param


async def test_stop_strings_and_turns_are_bounded():
    found = []

    async def converse(client, prompt):
        found.append(await refusal(client, stop="a" * 1001))
        found.append(await refusal(client, [{"role": "user", "content": ""}] * 1001))
        await ask(client, PROMPT.messages, stop="a" * 1000)

    await rollout(Script("2"), converse)
    assert found == [("invalid_value", "stop"), ("context_length_exceeded", "messages")]


@pytest.mark.parametrize(("charset", "status"), [("punycode", 400), ("idna", 400), ("utf-16", 200), ("UTF-8", 200)])
async def test_a_body_is_read_by_the_charsets_of_json(charset, status):
    found = []

    async def converse(client, prompt):
        body = json.dumps({"model": "m", "messages": PROMPT.messages})
        data = body.encode(charset if status == 200 else "ascii")
        headers = {"Content-Type": f"application/json; charset={charset}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{client.base_url}chat/completions", data=data, headers=headers) as response,
        ):
            found.append((response.status, (await response.json()).get("error", {}).get("param")))

    if status == 200:
        await rollout(Script("2"), converse)
    else:
        with pytest.raises(GivenUp):
            await rollout(Script("2"), converse)
    assert found == [(status, None if status == 200 else "Content-Type")]
