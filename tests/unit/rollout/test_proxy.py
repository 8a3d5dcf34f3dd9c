"""Agents that speak to OpenAI's API are rollouts: its own client against the proxy over an engine in this process."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections import Counter
from typing import Any

import numpy as np
import openai
import pytest

from slimx.data.prompts import PromptSource
from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.rollout import agent
from slimx.rollout.hooks import GivenUp
from slimx.rollout.proxy.server import ChatProxy
from tests.refusals import invalid, refused
from tests.unit.rollout.proxy_stand import END, PROMPT, Script, bare, call, client_of, context, rollout, tokenizer
from tests.unit.rollout.rollout_stand import Stand, config_of, one, prompts

USER = list(PROMPT.messages)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'


def encode(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False).input_ids


def text_of(trajectory: Trajectory) -> str:
    return tokenizer().decode(trajectory.token_ids.tolist())


def trained(trajectory: Trajectory) -> str:
    return tokenizer().decode(trajectory.token_ids[trajectory.loss_mask == 1].tolist())


STAND = "tests.unit.rollout.proxy_stand"


async def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=messages, **options)


async def said(client: Any, messages: list[Any], **options: Any) -> Any:
    return (await ask(client, messages, **options)).choices[0].message


# What is captured -----------------------------------------------------------------------------------------------------


def assert_equal(found: Trajectory, expected: Trajectory) -> None:
    for name in ("token_ids", "loss_mask", "logprobs", "routed_experts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    for name in ("spans", "sampling", "id", "rollout_id", "group_id", "index", "status", "finish_reason", "turns"):
        assert getattr(found, name) == getattr(expected, name), name


async def test_an_agent_of_two_turns_is_the_rollout_that_a_hook_would_have_made():
    async def two_turns(client: Any, prompt: Any) -> str:
        first = await said(client, USER)
        second = await said(client, [*USER, first, {"role": "user", "content": "Sure?"}])
        return second.content

    engine = Script("it is 3", "it is 2")
    (found,) = await rollout(engine, two_turns)

    other = Script("it is 3", "it is 2")
    ctx = context(other, None)
    draft = ctx.draft(PROMPT)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=0))
    draft.add_inserted(ctx.turn("Sure?", after=draft.token_ids))
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1))
    assert_equal(found, draft.finish())
    assert engine.asked == other.asked
    assert found.metadata == {"requests": 2, "overridden": [], "result": "it is 2", "branch": 0}
    assert trained(found) == "it is 3<end>it is 2<end>"


async def test_sampled_ids_stand_where_their_text_would_be_tokenized_otherwise():
    class Odd(Script):
        """Ends its text with a token without text, which no tokenizer would give back."""

        async def generate(self, *arguments: Any) -> Any:
            completion = await super().generate(*arguments)
            completion.token_ids[-2] = 0  # <pad>, a special token
            return completion

    async def two_turns(client: Any, prompt: Any) -> None:
        first = await said(client, USER)
        assert first.content == "it is "
        await said(client, [*USER, first, {"role": "user", "content": "Sure?"}])

    engine = Odd("it is 3", "2")
    (found,) = await rollout(engine, two_turns)
    assert engine.prompts[1][: len(engine.prompts[0]) + 8] == [*engine.prompts[0], *encode("it is "), 0, END]
    assert found.token_ids[len(engine.prompts[0]) :][:8].tolist() == [*encode("it is "), 0, END]


async def test_an_answer_that_the_agent_rewrote_begins_a_branch_and_leaves_the_other_whole():
    async def rewrite(client: Any, prompt: Any) -> None:
        first = await said(client, USER)
        second = {"role": "user", "content": "More?"}
        answer = await said(client, [*USER, first, second])
        altered = {"role": "assistant", "content": answer.content.upper()}
        await said(client, [*USER, first, second, altered, {"role": "user", "content": "End?"}])

    one, two = await rollout(Script("a", "bc", "d"), rewrite)
    assert text_of(one) == "<user>user: 1+1=<end>\n<assistant>a<end>\n<user>user: More?<end>\n<assistant>bc<end>"
    assert text_of(two) == text_of(one)[: -len("bc<end>")].removesuffix("<user>user: More?<end>\n<assistant>") + (
        "<user>user: More?<end>\n<assistant>BC<end>\n<user>user: End?<end>\n<assistant>d<end>"
    )
    assert trained(one) == "a<end>bc<end>" and trained(two) == "d<end>", "what both share is trained once"
    assert (one.id, two.id) == ("g/0", "g/0-1") and one.rollout_id == two.rollout_id == "g/0"
    sampled = [tokenizer().decode(trajectory.sampled_ids().tolist()) for trajectory in (one, two)]
    assert sampled == ["a<end>bc<end>", "a<end>d<end>"], "where each token came from is kept"


async def test_sub_agents_summaries_and_second_tries_are_trajectories_of_one_rollout():
    async def busy(client: Any, prompt: Any) -> None:
        first = await said(client, USER)
        await asyncio.gather(
            said(client, [{"role": "system", "content": "helper"}, *USER]),
            said(client, [*USER, first, {"role": "user", "content": "A"}]),
            said(client, [*USER, first, {"role": "user", "content": "B"}]),
        )
        await said(client, USER)
        await said(client, [{"role": "user", "content": "so far: 2"}])

    found = await rollout(Script("1", "2", "3", "4", "5", "6"), busy)
    assert [trained(trajectory) for trajectory in found] == ["2<end>", "1<end>3<end>", "4<end>", "5<end>", "6<end>"]
    assert {trajectory.rollout_id for trajectory in found} == {"g/0"} and len({t.id for t in found}) == 5
    assert [trajectory.metadata["branch"] for trajectory in found] == [0, 1, 2, 3, 4]


async def test_what_an_agent_may_do_to_an_answer_without_changing_it():
    async def sloppy(client: Any, prompt: Any) -> None:
        first = await said(client, USER, tools=TOOLS)
        call = first.tool_calls[0]
        again = {
            "role": "assistant",
            "content": "  ",
            "tool_calls": [
                {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"b":"x",  "a":1}'}}
            ],
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "2"}]}
        await said(client, [*USER, again, result], tools=TOOLS)

    (found,) = await rollout(Script(CALL, "2"), sloppy)
    assert text_of(found).endswith(f"<assistant>{CALL}<end>\n<user>tool: 2<end>\n<assistant>2<end>")


async def test_calls_of_tools_are_counted():
    async def calls(client: Any, prompt: Any) -> None:
        await said(client, USER, tools=TOOLS)
        await said(client, [{"role": "user", "content": "again"}], tools=TOOLS)

    proxy, call.function = ChatProxy(context=1000), calls
    try:
        ctx = context(Script(CALL, "2"), proxy)
        await agent.generate(ctx, PROMPT, agent="tests.unit.rollout.proxy_stand.call")
    finally:
        await proxy.stop()
    assert ctx.metrics == {"tool_calls": 1.0}


async def test_other_tools_are_another_conversation():
    async def change(client: Any, prompt: Any) -> None:
        first = await said(client, USER, tools=TOOLS)
        await said(client, [*USER, first, {"role": "user", "content": "B"}])

    one, two = await rollout(Script("1", "2"), change)
    assert text_of(one).startswith("[tools ") and text_of(two).startswith("<user>")


# What the agent sees --------------------------------------------------------------------------------------------------


async def test_an_answer_has_the_shape_that_the_client_knows():
    async def look(client: Any, prompt: Any) -> None:
        answer = await ask(client, USER, logprobs=True, user="me", seed=3, store=False, n=1)
        assert (answer.model, answer.object, answer.choices[0].finish_reason) == ("m", "chat.completion", "stop")
        assert answer.choices[0].message.content == "ab" and answer.choices[0].message.tool_calls is None
        prompt_tokens = len(encode("<user>user: 1+1=<end>\n<assistant>"))
        assert answer.usage.prompt_tokens == prompt_tokens and answer.usage.completion_tokens == 3
        assert answer.usage.total_tokens == prompt_tokens + 3 and answer.usage.prompt_tokens_details.cached_tokens == 2
        told = answer.choices[0].logprobs.content
        assert [(entry.token, entry.logprob) for entry in told] == [("a", -0.125), ("b", -0.25), ("<end>", -0.375)]
        assert (await client.models.list()).data[0].id == "policy"

    await rollout(Script("ab"), look)


async def test_tool_calls_are_parsed_and_malformed_ones_are_text():
    async def look(client: Any, prompt: Any) -> None:
        answer = await ask(client, USER, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
            "function",
            "add",
            {"a": 1, "b": "x"},
        )
        assert answer.choices[0].message.content == "so" and answer.choices[0].finish_reason == "tool_calls"
        for expected in ('<tool_call>{"name": </tool_call>', '<tool_call>{"name": "add"', "<tool_call>[1]</tool_call>"):
            answer = await ask(client, USER, tools=TOOLS)
            assert answer.choices[0].message.content == expected and not answer.choices[0].message.tool_calls
        assert (await said(client, USER, tools=TOOLS, tool_choice="none")).content == CALL
        assert (await said(client, USER)).content == CALL, "no tools, no calls"

    await rollout(
        Script(
            f"so {CALL}",
            '<tool_call>{"name": </tool_call>',
            '<tool_call>{"name": "add"',
            "<tool_call>[1]</tool_call>",
            CALL,
            CALL,
        ),
        look,
    )


@pytest.mark.parametrize("apart", [False, True])
async def test_a_parser_sees_the_special_tokens_that_mark_calls_but_the_agent_does_not(apart):
    async def look(client: Any, prompt: Any) -> None:
        for content, calls in (("so", ["add"]), ("so", [])):
            answer = await said(client, USER, tools=TOOLS)
            assert answer.content == content and [c.function.name for c in answer.tool_calls or []] == calls

    thought = "<think>add <user>them</think>" if apart else ""
    engine = Script(f"{thought}so<user>add<pad>", f"{thought}so<pad>")
    await rollout(engine, look, tool_parser="tests.unit.rollout.proxy_stand.marked", separate_reasoning=apart)


async def test_reasoning_is_set_apart_if_asked_for_and_stays_in_the_tokens():
    async def look(client: Any, prompt: Any) -> None:
        first = await said(client, USER)
        assert first.content == "2" and first.reasoning_content == "well"
        await said(client, [*USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}])

    (found,) = await rollout(Script("<think>well</think>\n\n2", "yes"), look, separate_reasoning=True)
    assert trained(found) == "<think>well</think>\n\n2<end>yes<end>"


async def test_a_stream_has_the_text_of_a_whole_answer_and_is_captured_alike():
    async def streaming(client: Any, prompt: Any) -> None:
        parts, usage, finish, told = [], None, None, []
        options = {"stream_options": {"include_usage": True}, "logprobs": True}
        async for chunk in await ask(client, USER, stream=True, **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                finish = choice.finish_reason or finish
                told += choice.logprobs.content if choice.logprobs else []
        assert "".join(parts) == "it is 3" and sum(map(bool, parts)) == 4 and finish == "stop"
        assert usage.completion_tokens == 8 and [entry.logprob for entry in told] == [-n / 8 for n in range(1, 9)]
        first = {"role": "assistant", "content": "".join(parts)}
        await said(client, [*USER, first, {"role": "user", "content": "Sure?"}])

    async def plain(client: Any, prompt: Any) -> None:
        first = await said(client, USER)
        await said(client, [*USER, first, {"role": "user", "content": "Sure?"}])

    (streamed,), (whole,) = [await rollout(Script("it is 3", "2"), function) for function in (streaming, plain)]
    assert_equal(streamed, whole)


async def test_a_stream_with_tools_brings_the_calls_at_its_end():
    async def look(client: Any, prompt: Any) -> None:
        chunks = [chunk.choices[0] async for chunk in await ask(client, USER, tools=TOOLS, stream=True)]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert (call.index, call.function.name) == (0, "add") and chunks[-1].finish_reason == "tool_calls"
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "so"
        first = {"role": "assistant", "content": "so", "tool_calls": [call.model_dump(exclude={"index"})]}
        await said(client, [*USER, first, {"role": "tool", "tool_call_id": call.id, "content": "2"}], tools=TOOLS)

    assert len(await rollout(Script(f"so {CALL}", "2"), look)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text_and_stay_in_the_tokens(stream):
    async def look(client: Any, prompt: Any) -> None:
        if stream:
            parts = [c.choices[0].delta.content or "" async for c in await ask(client, USER, stop="Obs:", stream=True)]
            assert not any("O" in part for part in parts[:3]), "what may begin a stop string is held back"
            text = "".join(parts)
        else:
            text = (await said(client, USER, stop=["Obs:", "zz"])).content
        assert text == "act Ob 1 "
        await said(client, [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": "2"}])

    engine = Script("act Ob 1 Obs: no", "done")
    (found,) = await rollout(engine, look)
    assert "act Ob 1 Obs: no<end>\n<user>user: 2" in text_of(found)
    assert engine.asked[0][1]["stop"] == (["Obs:"] if stream else ["Obs:", "zz"])


def test_the_synchronous_client_works_too():
    def blocking(base_url: str) -> str:
        with openai.OpenAI(base_url=base_url, api_key="x") as client:
            parts = [
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(model="m", messages=USER, stream=True)
            ]
            return "".join(parts) + client.chat.completions.create(model="m", messages=USER).choices[0].message.content

    async def in_thread(client: Any, prompt: Any) -> str:
        return await asyncio.to_thread(blocking, str(client.base_url))

    found = asyncio.run(rollout(Script("ab", "cd"), in_thread))
    assert found[0].metadata["result"] == "abcd" and len(found) == 2


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "several answers": ({"n": 2}, "unsupported_value", "n 2"),
    "penalties": ({"presence_penalty": 0.5}, "unsupported_value", "presence_penalty 0.5"),
    "biases": ({"logit_bias": {"5": 1}}, "unsupported_value", "logit_bias"),
    "grammars": ({"response_format": {"type": "json_object"}}, "unsupported_value", "response_format"),
    "forced tools": ({"tools": TOOLS, "tool_choice": "required"}, "unsupported_value", "tool_choice"),
    "alternatives": ({"logprobs": True, "top_logprobs": 3}, "unsupported_value", "top_logprobs 3"),
    "unknown parameters": ({"extra_body": {"top_k": 4}}, "unsupported_parameter", "top_k"),
    "no messages": ({"messages": []}, "invalid_value", "must end with"),
    "nothing to answer": ({"messages": [*USER, {"role": "assistant", "content": "2"}]}, "invalid_value", "must end"),
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


async def test_what_cannot_be_carried_out_is_refused_in_the_apis_own_shape_and_is_no_part_of_the_rollout():
    async def refused(client: Any, prompt: Any) -> None:
        for case, (options, code, text) in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, **{"messages": USER, **options})
            assert caught.value.code == code and text in str(caught.value), case
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="m", prompt="x")
        assert caught.value.code == "unknown_url"
        await said(client, USER)

    engine = Script("2")
    assert len(await rollout(engine, refused, tokens=150)) == 1 and len(engine.asked) == 1


async def test_the_run_decides_temperature_and_top_p_or_refuses_others():
    async def own(client: Any, prompt: Any) -> None:
        await said(client, USER, temperature=0.2, top_p=1.0)

    engine = Script("2")
    (found,) = await rollout(engine, own)
    assert engine.asked[0][1]["temperature"] == 1.0 and found.metadata["overridden"] == ["temperature"]
    with refused("hooks.given_up", about="agent failed", kind=GivenUp) as caught:
        await rollout(Script("2"), own, sampling="strict")
    cause = caught.value.__cause__
    assert isinstance(cause, openai.BadRequestError) and cause.param == "temperature"


async def test_the_length_of_an_answer_is_what_the_narrowest_limit_allows():
    prompt = len(encode("<user>user: 1+1=<end>\n<assistant>"))

    async def lengths(client: Any, _: Any) -> None:
        for options in ({}, {"max_tokens": 5}, {}):
            await said(client, USER, **options)

    for tokens, budget, expected in (
        (1000, None, [100, 5, 100]),
        (prompt + 30, None, [30, 5, 30]),
        (1000, 60, [60, 5, 60 - 51 - 5]),
    ):
        engine = Script("x" * 50, "x" * 50, "x" * 50)
        found = await rollout(engine, lengths, tokens=tokens, max_tokens=budget)
        assert [sampling["max_new_tokens"] for _, sampling, _ in engine.asked] == expected
        assert [t.status for t in found] == ["completed" if n > 51 else "truncated" for n in expected]
    engine = Script("x" * 50, "x" * 50)
    assert [t.status for t in await rollout(engine, lengths, max_tokens=56)] == ["completed", "truncated"]


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "requests": ({"max_requests": 2}, "2 requests"),
    "context": ({"max_context": 80}, "80 tokens"),
    "tokens": ({"max_tokens": 4}, "4 sampled tokens"),
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_an_agent_that_falls_over_a_limit_has_not_failed_its_conversation_is_cut_off(limit):
    options, text = LIMITS[limit]

    async def forever(client: Any, prompt: Any) -> None:
        await said(client, [{"role": "user", "content": "x"}])
        messages = list(USER)
        while True:
            try:
                answer = await said(client, messages)
            except openai.BadRequestError as error:
                assert text in str(error)
                raise
            messages += [answer, {"role": "user", "content": "more?"}]

    short, cut = await rollout(Script(*"1234567"), forever, **options)
    assert (short.status, cut.status) == ("completed", "truncated")
    assert cut.metadata["result"] is None and trained(cut).startswith("2<end>")


# What ends a rollout --------------------------------------------------------------------------------------------------


async def test_agents_that_fail_or_ask_for_nothing_are_given_up_under_their_reason():
    async def raises(client: Any, prompt: Any) -> None:
        await said(client, USER)
        raise KeyError("tool")

    async def silent(client: Any, prompt: Any) -> None:
        return None

    async def swallows(client: Any, prompt: Any) -> None:
        with pytest.raises(openai.InternalServerError):
            await said(client, USER)

    for function, reason, cause, named in (
        (raises, "agent failed", "KeyError", "KeyError: 'tool'"),
        (silent, "agent without answers", "NoneType", f"{STAND}.call"),
        (swallows, "agent without answers", "NoneType", "the engine is gone"),
    ):
        with refused("hooks.given_up", about=reason, kind=GivenUp) as caught:
            await rollout(Script(SlimxError("the engine is gone") if function is swallows else "2"), function)
        assert caught.value.reason == reason and type(caught.value.__cause__).__name__ == cause
        assert named in str(caught.value) and f"{STAND}.call" in str(caught.value)


async def test_a_prompt_of_token_ids_is_nothing_for_an_agent():
    proxy = ChatProxy(context=100)
    with refused("agent.prompt", about="ids"):
        await agent.generate(
            context(Script(), proxy), Prompt(id="ids", token_ids=[1]), agent="tests.unit.rollout.proxy_stand.call"
        )


async def test_dead_agents_are_counted_by_reason_and_take_no_other_group_along():
    shared = client_of("http://127.0.0.1:1/v1")  # a client takes long to be made

    async def various(base_url: str, prompt: Any) -> None:
        await said(shared.with_options(base_url=base_url), prompt.messages)
        if prompt.id == unlucky[0]:
            raise ValueError("no tool")
        if prompt.id == unlucky[1]:
            await asyncio.sleep(60)

    source = PromptSource(prompts(), 1)
    unlucky = [source.next().id for _ in range(3)][1:]
    bare.function = various
    hook = functools.partial(agent.generate, agent="tests.unit.rollout.proxy_stand.bare")
    proxy = ChatProxy(context=200)
    async with Stand(config_of(max_failed_share=1.0, rollout_deadline=4.0), generate=hook, reward=one) as stand:
        stand.maker.proxy = proxy
        batch = await stand.next_batch()
        assert batch.dropped == Counter({"agent failed": 1, "generate deadline": 1})
        assert [len(group.trajectories) for group in batch.groups] == [2, 2, 2, 2]
        assert any(f"{STAND}.bare" in out.detail and "ValueError: no tool" in out.detail for out in stand.dropped)
    await proxy.stop()
    await shared.close()


async def test_an_answer_that_nobody_waited_for_is_no_part_of_the_rollout():
    begun, over = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 0:
            begun.set()
            await over.wait()

    async def impatient(client: Any, prompt: Any) -> None:
        first = asyncio.create_task(said(client, USER))
        await begun.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await said(client, USER)
        over.set()  # the engine would answer now
        await said(client, USER)

    engine = Script("too late", "2", "3")
    engine.gate = gate
    found = await rollout(engine, impatient)
    assert [trained(trajectory) for trajectory in found] == ["2<end>", "3<end>"]


async def test_a_stream_that_the_agent_leaves_ends_at_the_engine_and_is_no_part_of_the_rollout():
    async def leaves(client: Any, prompt: Any) -> None:
        async for chunk in (stream := await ask(client, USER, stream=True)):
            if chunk.choices[0].delta.content:
                await stream.close()
                break
        await said(client, USER)

    engine = Script("x" * 90, "2")
    engine.pause = 0.02
    (found,) = await rollout(engine, leaves)
    assert trained(found) == "2<end>" and engine.left == 1


async def test_a_parser_that_raises_is_told_to_the_agent():
    async def look(client: Any, prompt: Any) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await said(client, USER, tools=TOOLS)
        assert caught.value.code == "tool_parser_failed" and "IndexError: 1" in caught.value.message
        await said(client, USER)

    assert len(await rollout(Script("1", "2"), look, tool_parser="tests.unit.rollout.proxy_stand.fragile")) == 1


async def test_an_address_that_is_taken_or_that_nobody_could_be_told_is_refused():
    for host in ("0.0.0.0", "::"):
        with invalid("proxy.host", about="rollout.proxy.host"):
            config_of(proxy={"host": host})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        proxy = ChatProxy("127.0.0.1", port, context=100)
        with refused("hooks.given_up", about="agent failed") as told:
            await agent.generate(context(Script("1"), proxy), PROMPT, agent="tests.unit.rollout.proxy_stand.call")
        cause = told.value.__cause__
        assert isinstance(cause, SlimxError) and (cause.code, cause.about) == ("proxy.address", "rollout.proxy")


async def test_a_session_ends_with_its_rollout_and_others_cannot_reach_it():
    proxy = ChatProxy(context=100)
    left: dict[str, Any] = {}
    engine = Script("never", "2")

    async def gate(number: int) -> None:
        await asyncio.sleep(60 if number == 0 else 0)

    engine.gate = gate

    async def leaves(client: Any, prompt: Any) -> None:
        left["client"] = client_of(str(client.base_url))
        left["pending"] = asyncio.create_task(said(left["client"], USER))
        await asyncio.sleep(0.1)
        await said(client, USER)

    call.function = leaves
    try:
        (found,) = await agent.generate(context(engine, proxy), PROMPT, agent="tests.unit.rollout.proxy_stand.call")
        assert trained(found) == "2<end>"
        with pytest.raises(openai.APIConnectionError):
            await left["pending"]
        with pytest.raises(openai.NotFoundError) as caught:
            await said(left["client"], USER)
        assert caught.value.code == "session_not_found"
        other = str(left["client"].base_url).replace("/v1/", "x/v1/")
        with pytest.raises(openai.NotFoundError) as caught:
            await said(client_of(other), USER)
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
