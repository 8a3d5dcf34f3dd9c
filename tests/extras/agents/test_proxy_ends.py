"""Agents that send invalid requests, exceed a limit, fail or leave: the answers they get, and the metrics."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections import Counter
from typing import Any

import openai
import pytest

from slimx.data.prompts.read import PromptSource
from slimx.data.records import Prompt
from slimx.errors import DeadlineError, SlimxError
from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.rollout.client.sending import REQUEST
from slimx.rollout.hooks import GivenUp
from tests.extras.agents.proxy_stand import (
    PROMPT,
    TOOLS,
    USER,
    Script,
    ask,
    bare,
    call,
    chat,
    client_of,
    context,
    encode,
    rollout,
    trained,
)
from tests.refusals import invalid, refused
from tests.unit.rollout.rollout_stand import Stand, config_of, one, prompts

STAND = "tests.extras.agents.proxy_stand"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "several answers": ({"n": 2}, "unsupported_value", "n 2"),
    "penalties": ({"presence_penalty": 0.5}, "unsupported_value", "presence_penalty 0.5"),
    "biases": ({"logit_bias": {"5": 1}}, "unsupported_value", "logit_bias"),
    "grammars": ({"response_format": {"type": "json_object"}}, "unsupported_value", "response_format"),
    "a choice": ({"tools": TOOLS, "tool_choice": "novel"}, "unsupported_value", "tool_choice"),
    "alternatives": ({"logprobs": True, "top_logprobs": 3}, "unsupported_value", "top_logprobs 3"),
    "unknown parameters": ({"extra_body": {"top_k": 4}}, "unsupported_parameter", "top_k"),
    "no messages": ({"messages": []}, "invalid_value", "is empty or ends"),
    "nothing to answer": ({"messages": [*USER, {"role": "assistant", "content": "2"}]}, "invalid_value", "ends with"),
    "an unknown role": ({"messages": [{"role": "judge", "content": "x"}]}, "invalid_value", "messages[0]"),
    "images": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "unsupported_value",
        "content of type image_url",
    ),
    "no room for an answer": ({"max_tokens": 0}, "invalid_value", "max_tokens is 0"),
    "too many stop strings": ({"stop": list("abcde")}, "invalid_value", "up to four"),
    "a conversation that is too long": (
        {"messages": [{"role": "user", "content": "x" * 200}]},
        "context_length_exceeded",
        "150 tokens",
    ),
}


async def test_unsupported_requests_are_refused_in_the_apis_error_format():
    async def refused(client: Any, prompt: Any) -> None:
        for case, (options, code, text) in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, **{"messages": USER, **options})
            assert caught.value.code == code and text in str(caught.value), case
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="m", prompt="x")
        assert caught.value.code == "unknown_url"
        await chat(client, USER)

    engine = Script("2")
    assert len(await rollout(engine, refused, tokens=150)) == 1 and len(engine.received) == 1


async def test_the_run_decides_temperature_and_top_p_or_refuses_others():
    async def override(client: Any, prompt: Any) -> None:
        await chat(client, USER, temperature=0.2, top_p=1.0)

    engine = Script("2")
    (found,) = await rollout(engine, override)
    assert engine.received[0][1]["temperature"] == 1.0 and found.metadata["overridden"] == ["temperature"]
    with refused("hooks.given_up", about="agent failed", kind=GivenUp) as caught:
        await rollout(Script("2"), override, sampling="strict")
    cause = caught.value.__cause__
    assert isinstance(cause, openai.BadRequestError) and cause.param == "temperature"


async def test_the_length_of_an_answer_is_what_the_narrowest_limit_allows():
    prompt = len(encode("<user>user: 1+1=<end>\n<assistant>"))

    async def lengths(client: Any, _: Any) -> None:
        for options in ({}, {"max_tokens": 5}, {}):
            await chat(client, USER, **options)

    for tokens, budget, expected in (
        (1000, None, [100, 5, 100]),
        (prompt + 30, None, [30, 5, 30]),
        (1000, 60, [60, 5, 60 - 51 - 5]),
    ):
        engine = Script("x" * 50, "x" * 50, "x" * 50)
        found = await rollout(engine, lengths, tokens=tokens, max_tokens=budget)
        assert [sampling["max_new_tokens"] for _, sampling, _ in engine.received] == expected
        assert [t.status for t in found] == ["completed" if n > 51 else "truncated" for n in expected]
    engine = Script("x" * 50, "x" * 50)
    assert [t.status for t in await rollout(engine, lengths, max_tokens=56)] == ["completed", "truncated"]


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "requests": ({"max_requests": 2}, "2 requests"),
    "context": ({"max_context": 80}, "80 tokens"),
    "tokens": ({"max_tokens": 4}, "4 sampled tokens"),
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_an_agent_at_a_limit_has_not_failed_its_conversation_is_truncated(limit):
    options, text = LIMITS[limit]

    async def forever(client: Any, prompt: Any) -> None:
        await chat(client, [{"role": "user", "content": "x"}])
        messages = list(USER)
        while True:
            try:
                answer = await chat(client, messages)
            except openai.BadRequestError as error:
                assert text in str(error)
                raise
            messages += [answer, {"role": "user", "content": "more?"}]

    short, cut = await rollout(Script(*"1234567"), forever, **options)
    assert (short.status, cut.status) == ("completed", "truncated")
    assert cut.metadata["result"] is None and trained(cut).startswith("2<end>")


async def test_agents_that_fail_or_sample_nothing_are_dropped_with_a_reason():
    async def raises(client: Any, prompt: Any) -> None:
        await chat(client, USER)
        raise KeyError("tool")

    async def silent(client: Any, prompt: Any) -> None:
        return None

    async def asks(client: Any, prompt: Any) -> None:
        await chat(client, USER)

    async def swallows(client: Any, prompt: Any) -> None:
        with pytest.raises(openai.InternalServerError):
            await chat(client, USER)

    gone, late = SlimxError("the engine is gone"), DeadlineError(REQUEST, 600, "http://router")
    for function, answer, reason, cause, named in (
        (raises, "2", "agent failed", "KeyError", "KeyError: 'tool'"),
        (silent, "2", "agent without answers", "NoneType", f"{STAND}.call"),
        (swallows, gone, "agent without answers", "NoneType", "the engine is gone"),
        (swallows, late, "engine deadline", "NoneType", "http://router"),
        (asks, late, "engine deadline", "InternalServerError", "http://router"),
    ):
        with refused("hooks.given_up", about=reason, kind=GivenUp) as caught:
            await rollout(Script(answer), function)
        assert caught.value.reason == reason and type(caught.value.__cause__).__name__ == cause
        assert named in str(caught.value) and f"{STAND}.call" in str(caught.value)


async def test_a_prompt_of_token_ids_is_nothing_for_an_agent():
    proxy = ChatProxy(context=100)
    with refused("agent.prompt", about="ids"):
        await agent.generate(
            context(Script(), proxy), Prompt(id="ids", token_ids=[1]), agent="tests.extras.agents.proxy_stand.call"
        )


async def test_dead_agents_are_counted_by_reason_and_take_no_other_group_along():
    shared = client_of("http://127.0.0.1:1/v1")  # a client takes long to be made

    async def various(base_url: str, prompt: Any) -> None:
        await chat(shared.with_options(base_url=base_url), prompt.messages)
        if prompt.id == unlucky[0]:
            raise ValueError("no tool")
        if prompt.id == unlucky[1]:
            await asyncio.sleep(60)

    source = PromptSource(prompts(), 1)
    unlucky = [source.next().id for _ in range(3)][1:]
    bare.function = various
    hook = functools.partial(agent.generate, agent="tests.extras.agents.proxy_stand.bare")
    proxy = ChatProxy(context=200)
    patient, strict = (config_of(max_failed_share=1.0, rollout_deadline=seconds) for seconds in (600.0, 4.0))
    async with Stand(patient, generate=hook, reward=one) as stand:
        rollout = stand.maker._rollout

        async def with_deadline(prompt: Prompt, *rest: Any, **options: Any) -> Any:
            stand.maker.config = strict if prompt.id == unlucky[1] else patient
            return await rollout(prompt, *rest, **options)

        stand.maker.proxy, stand.maker._rollout = proxy, with_deadline
        batch = await stand.next_batch()
        assert batch.dropped == Counter({"agent failed": 1, "generate deadline": 1})
        assert [len(group.trajectories) for group in batch.groups] == [2, 2, 2, 2]
        assert any(f"{STAND}.bare" in out.detail and "ValueError: no tool" in out.detail for out in stand.dropped)
    await proxy.stop()
    await shared.close()


async def test_an_answer_that_the_client_did_not_await_is_discarded():
    begun, over = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 0:
            begun.set()
            await over.wait()

    async def impatient(client: Any, prompt: Any) -> None:
        first = asyncio.create_task(chat(client, USER))
        await begun.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await chat(client, USER)
        over.set()  # the engine would answer now
        await chat(client, USER)

    engine = Script("too late", "2", "3")
    engine.gate = gate
    found = await rollout(engine, impatient)
    assert [trained(trajectory) for trajectory in found] == ["2<end>", "3<end>"]


async def test_a_stream_that_the_agent_leaves_is_not_part_of_the_rollout():
    async def leaves(client: Any, prompt: Any) -> None:
        async for chunk in (stream := await ask(client, USER, stream=True)):
            if chunk.choices[0].delta.content:
                await stream.close()
                break
        await chat(client, USER)

    engine = Script("x" * 90, "2")
    engine.pause = 0.02
    (found,) = await rollout(engine, leaves)
    assert trained(found) == "2<end>" and engine.left == 1


async def test_an_error_of_the_tool_parser_is_returned_to_the_agent():
    async def look(client: Any, prompt: Any) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(client, USER, tools=TOOLS)
        assert caught.value.code == "tool_parser_failed" and "IndexError: 1" in caught.value.message
        await chat(client, USER)

    assert len(await rollout(Script("1", "2"), look, tool_parser="tests.extras.agents.proxy_stand.fragile")) == 1


async def test_an_address_in_use_or_unreachable_by_clients_is_refused():
    for host in ("0.0.0.0", "::"):
        with invalid("proxy.host", about="rollout.proxy.host"):
            config_of(proxy={"host": host})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        proxy = ChatProxy("127.0.0.1", port, context=100)
        with refused("hooks.given_up", about="agent failed") as caught:
            await agent.generate(context(Script("1"), proxy), PROMPT, agent="tests.extras.agents.proxy_stand.call")
        cause = caught.value.__cause__
        assert isinstance(cause, SlimxError) and (cause.code, cause.about) == ("proxy.address", "rollout.proxy")


async def test_a_session_ends_with_its_rollout_and_others_cannot_reach_it():
    proxy = ChatProxy(context=100)
    left: dict[str, Any] = {}
    engine, begun = Script("never", "2"), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 0:
            begun.set()
            await asyncio.sleep(600)

    engine.gate = gate

    async def leaves(client: Any, prompt: Any) -> None:
        left["client"] = client_of(str(client.base_url))
        left["pending"] = asyncio.create_task(chat(left["client"], USER))
        await begun.wait()
        await chat(client, USER)

    call.function = leaves
    try:
        (found,) = await agent.generate(context(engine, proxy), PROMPT, agent="tests.extras.agents.proxy_stand.call")
        assert trained(found) == "2<end>"
        with pytest.raises(openai.APIConnectionError):
            await left["pending"]
        with pytest.raises(openai.NotFoundError) as caught:
            await chat(left["client"], USER)
        assert caught.value.code == "session_not_found"
        other = str(left["client"].base_url).replace("/v1/", "x/v1/")
        with pytest.raises(openai.NotFoundError) as caught:
            await chat(client_of(other), USER)
        assert caught.value.code == "session_not_found"
    finally:
        await left["client"].close()
        await proxy.stop()


@pytest.mark.parametrize(
    "options, code, about",
    [
        ({}, "agent.program", ""),
        ({"agent": f"{STAND}.call", "command": ["true"]}, "agent.program", ""),
        ({"agent": f"{STAND}.END"}, "dotted.callable", ".agent"),
        ({"agent": f"{STAND}.nothing"}, "dotted.missing", ".agent"),
        ({"agent": f"{STAND}.call", "agent_options": {"depth": 3}}, "dotted.options", ".agent_options"),
        ({"command": ["no-such-program"]}, "agent.program", ".command"),
        ({"agent": f"{STAND}.call", "sampling": "own"}, "agent.sampling", ".sampling"),
        ({"agent": f"{STAND}.call", "tool_parser": f"{STAND}.rollout"}, "dotted.signature", ".tool_parser"),
        ({"agent": f"{STAND}.call", "tool_parser": "glm"}, "proxy.tool_parser", ".tool_parser"),
    ],
)
def test_an_agent_that_cannot_run_is_refused_before_the_run(options, code, about):
    with refused(code, about=f"rollout.options{about}"):
        agent.check(**options)
