"""Agents that speak to OpenAI's API are rollouts: its own client against the proxy over an engine in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from tests.extras.agents.proxy_stand import (
    CALL,
    END,
    PROMPT,
    TOOLS,
    USER,
    Script,
    ask,
    assert_equal,
    call,
    chat,
    context,
    encode,
    rollout,
    text_of,
    tokenizer,
    trained,
)


async def test_an_agent_of_two_turns_is_the_rollout_that_a_hook_would_have_made():
    async def two_turns(client: Any, prompt: Any) -> str:
        first = await chat(client, USER)
        second = await chat(client, [*USER, first, {"role": "user", "content": "Sure?"}])
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
    assert engine.received == other.received
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
        first = await chat(client, USER)
        assert first.content == "it is "
        await chat(client, [*USER, first, {"role": "user", "content": "Sure?"}])

    engine = Odd("it is 3", "2")
    (found,) = await rollout(engine, two_turns)
    assert engine.prompts[1][: len(engine.prompts[0]) + 8] == [*engine.prompts[0], *encode("it is "), 0, END]
    assert found.token_ids[len(engine.prompts[0]) :][:8].tolist() == [*encode("it is "), 0, END]


async def test_a_rewritten_answer_starts_a_branch():
    async def rewrite(client: Any, prompt: Any) -> None:
        first = await chat(client, USER)
        second = {"role": "user", "content": "More?"}
        answer = await chat(client, [*USER, first, second])
        altered = {"role": "assistant", "content": answer.content.upper()}
        await chat(client, [*USER, first, second, altered, {"role": "user", "content": "End?"}])

    one, two = await rollout(Script("a", "bc", "d"), rewrite)
    assert text_of(one) == "<user>user: 1+1=<end>\n<assistant>a<end>\n<user>user: More?<end>\n<assistant>bc<end>"
    assert text_of(two) == text_of(one)[: -len("bc<end>")].removesuffix("<user>user: More?<end>\n<assistant>") + (
        "<user>user: More?<end>\n<assistant>BC<end>\n<user>user: End?<end>\n<assistant>d<end>"
    )
    assert trained(one) == "a<end>bc<end>" and trained(two) == "d<end>", "what both share is trained once"
    assert (one.id, two.id) == ("g/0", "g/0-1") and one.rollout_id == two.rollout_id == "g/0"
    sampled = [tokenizer().decode(trajectory.sampled_ids().tolist()) for trajectory in (one, two)]
    assert sampled == ["a<end>bc<end>", "a<end>d<end>"], "where each token came from is kept"


async def test_sub_agents_and_summaries_are_trajectories_of_one_rollout():
    async def busy(client: Any, prompt: Any) -> None:
        first = await chat(client, USER)
        await asyncio.gather(
            chat(client, [{"role": "system", "content": "helper"}, *USER]),
            chat(client, [*USER, first, {"role": "user", "content": "A"}]),
            chat(client, [*USER, first, {"role": "user", "content": "B"}]),
        )
        await chat(client, USER)
        await chat(client, [{"role": "user", "content": "so far: 2"}])

    found = await rollout(Script("1", "2", "3", "4", "5", "6"), busy)
    texts = {trained(trajectory) for trajectory in found}
    # Of the three that are asked at once any may be heard first; one of the two tries goes on with the first answer.
    (tried,) = texts & {f"1<end>{answer}<end>" for answer in "234"}
    assert texts == {tried, "2<end>", "3<end>", "4<end>", "5<end>", "6<end>"} - {tried.removeprefix("1<end>")}
    assert {trajectory.rollout_id for trajectory in found} == {"g/0"} and len({t.id for t in found}) == 5
    assert [trajectory.metadata["branch"] for trajectory in found] == [0, 1, 2, 3, 4]


async def test_harmless_edits_of_an_answer_are_recognized_as_the_same():
    async def sloppy(client: Any, prompt: Any) -> None:
        first = await chat(client, USER, tools=TOOLS)
        call = first.tool_calls[0]
        again = {
            "role": "assistant",
            "content": "  ",
            "tool_calls": [
                {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"b":"x",  "a":1}'}}
            ],
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "2"}]}
        await chat(client, [*USER, again, result], tools=TOOLS)

    (found,) = await rollout(Script(CALL, "2"), sloppy)
    assert text_of(found).endswith(f"<assistant>{CALL}<end>\n<user>tool: 2<end>\n<assistant>2<end>")


async def test_calls_of_tools_are_counted():
    async def calls(client: Any, prompt: Any) -> None:
        await chat(client, USER, tools=TOOLS)
        await chat(client, [{"role": "user", "content": "again"}], tools=TOOLS)

    proxy, call.function = ChatProxy(context=1000), calls
    try:
        ctx = context(Script(CALL, "2"), proxy)
        await agent.generate(ctx, PROMPT, agent="tests.extras.agents.proxy_stand.call")
    finally:
        await proxy.stop()
    assert ctx.metrics == {"tool_calls": 1.0, "unreadable_calls": 0.0}


async def test_other_tools_are_another_conversation():
    async def change(client: Any, prompt: Any) -> None:
        first = await chat(client, USER, tools=TOOLS)
        await chat(client, [*USER, first, {"role": "user", "content": "B"}])

    one, two = await rollout(Script("1", "2"), change)
    assert text_of(one).startswith("[tools ") and text_of(two).startswith("<user>")


async def test_an_answer_has_the_shape_that_the_client_knows():
    async def look(client: Any, prompt: Any) -> None:
        answer = await ask(client, USER, logprobs=True, user="me", seed=3, store=False, n=1)
        assert (answer.model, answer.object, answer.choices[0].finish_reason) == ("m", "chat.completion", "stop")
        assert answer.choices[0].message.content == "ab" and answer.choices[0].message.tool_calls is None
        prompt_tokens = len(encode("<user>user: 1+1=<end>\n<assistant>"))
        assert answer.usage.prompt_tokens == prompt_tokens and answer.usage.completion_tokens == 3
        assert answer.usage.total_tokens == prompt_tokens + 3 and answer.usage.prompt_tokens_details.cached_tokens == 2
        logprobs = answer.choices[0].logprobs.content
        assert [(entry.token, entry.logprob) for entry in logprobs] == [("a", -0.125), ("b", -0.25), ("<end>", -0.375)]
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
        assert (await chat(client, USER, tools=TOOLS, tool_choice="none")).content == CALL
        assert (await chat(client, USER)).content == CALL, "no tools, no calls"

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
async def test_special_tokens_of_calls_reach_the_parser_but_not_the_agent(apart):
    async def look(client: Any, prompt: Any) -> None:
        for content, calls in (("so", ["add"]), ("so", [])):
            answer = await chat(client, USER, tools=TOOLS)
            assert answer.content == content and [c.function.name for c in answer.tool_calls or []] == calls

    thought = "<think>add <user>them</think>" if apart else ""
    engine = Script(f"{thought}so<user>add<pad>", f"{thought}so<pad>")
    await rollout(engine, look, tool_parser="tests.extras.agents.proxy_stand.marked", separate_reasoning=apart)


async def test_separate_reasoning_stays_in_the_trained_tokens():
    async def look(client: Any, prompt: Any) -> None:
        first = await chat(client, USER)
        assert first.content == "2" and first.reasoning_content == "well"
        await chat(client, [*USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}])

    (found,) = await rollout(Script("<think>well</think>\n\n2", "yes"), look, separate_reasoning=True)
    assert trained(found) == "<think>well</think>\n\n2<end>yes<end>"


async def test_a_stream_has_the_text_of_a_whole_answer_and_is_captured_alike():
    async def streaming(client: Any, prompt: Any) -> None:
        parts, usage, finish, logprobs = [], None, None, []
        options = {"stream_options": {"include_usage": True}, "logprobs": True}
        async for chunk in await ask(client, USER, stream=True, **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                finish = choice.finish_reason or finish
                logprobs += choice.logprobs.content if choice.logprobs else []
        assert "".join(parts) == "it is 3" and sum(map(bool, parts)) == 4 and finish == "stop"
        assert usage.completion_tokens == 8 and [entry.logprob for entry in logprobs] == [-n / 8 for n in range(1, 9)]
        first = {"role": "assistant", "content": "".join(parts)}
        await chat(client, [*USER, first, {"role": "user", "content": "Sure?"}])

    async def plain(client: Any, prompt: Any) -> None:
        first = await chat(client, USER)
        await chat(client, [*USER, first, {"role": "user", "content": "Sure?"}])

    (streamed,), (whole,) = [await rollout(Script("it is 3", "2"), function) for function in (streaming, plain)]
    assert_equal(streamed, whole)


async def test_a_stream_with_tools_brings_the_calls_at_its_end():
    async def look(client: Any, prompt: Any) -> None:
        chunks = [chunk.choices[0] async for chunk in await ask(client, USER, tools=TOOLS, stream=True)]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert (call.index, call.function.name) == (0, "add") and chunks[-1].finish_reason == "tool_calls"
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "so"
        first = {"role": "assistant", "content": "so", "tool_calls": [call.model_dump(exclude={"index"})]}
        await chat(client, [*USER, first, {"role": "tool", "tool_call_id": call.id, "content": "2"}], tools=TOOLS)

    assert len(await rollout(Script(f"so {CALL}", "2"), look)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text_and_stay_in_the_tokens(stream):
    async def look(client: Any, prompt: Any) -> None:
        if stream:
            parts = [c.choices[0].delta.content or "" async for c in await ask(client, USER, stop="Obs:", stream=True)]
            assert not any("O" in part for part in parts[:3]), "what may begin a stop string is held back"
            text = "".join(parts)
        else:
            text = (await chat(client, USER, stop=["Obs:", "zz"])).content
        assert text == "act Ob 1 "
        await chat(client, [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": "2"}])

    engine = Script("act Ob 1 Obs: no", "done")
    (found,) = await rollout(engine, look)
    assert "act Ob 1 Obs: no<end>\n<user>user: 2" in text_of(found)
    assert engine.received[0][1]["stop"] == (["Obs:"] if stream else ["Obs:", "zz"])


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
