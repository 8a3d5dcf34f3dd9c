"""Agents that speak to Anthropic's API are the rollouts that chat completions would have made: its own client against
the proxy over an engine in this process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.agents.proxy.tool_calls import ToolCall
from tests.extras.agents.proxy_stand import (
    ANSWERS,
    CALL,
    PROMPT,
    USER,
    Script,
    assert_as_by_chat_completions,
    bare,
    context,
    encode,
    text_of,
    trained,
    with_a_tool,
)

ADD = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
"""The tool of TOOLS in this API's words."""


async def messages(engine: Any, function: Any, *, tokens: int = 1000, retries: int = 0, **options: Any) -> Any:
    """Returns the trajectories of `async def function(client)`."""
    import anthropic  # 3 s of a core, which a worker that only collects this file does without

    async def act(url: str, prompt: Any) -> Any:
        base = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=retries) as client:
            return await function(client)

    bare.function, proxy = act, ChatProxy(context=tokens)
    try:
        options = {"agent": "tests.extras.agents.proxy_stand.bare", **options}
        found: list[Trajectory] = await agent.generate(context(engine, proxy), PROMPT, **options)
        return found
    finally:
        await proxy.stop()


async def ask(client: Any, turns: list[Any], **options: Any) -> Any:
    return await client.messages.create(**{"model": "m", "max_tokens": 100, "messages": turns, **options})


async def streamed(client: Any, turns: list[Any], **options: Any) -> Any:
    """Returns the message that the client builds from the events."""
    async with client.messages.stream(model="m", max_tokens=100, messages=turns, **options) as stream:
        return await stream.get_final_message()


def one(block: dict[str, Any], role: str = "user") -> list[Any]:
    return [{"role": role, "content": [block]}]


@pytest.mark.parametrize("how", [ask, streamed])
async def test_a_conversation_with_tools_is_captured_as_that_of_chat_completions(how: Any):
    async def with_messages(client: Any) -> None:
        first = await how(client, USER, system=[{"type": "text", "text": "Count."}], tools=[ADD])
        text, call = first.content
        assert (text.type, text.text, first.stop_reason) == ("text", "so", "tool_use")
        assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1, "b": "x"})
        result = one({"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]})
        answer = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        second = await how(client, [*USER, answer, *result], system="Count.", tools=[ADD])
        assert [block.text for block in second.content] == ["it is 2"] and second.stop_reason == "end_turn"

    (found,) = await messages(Script(*ANSWERS), with_messages)
    assert_as_by_chat_completions(found, await with_a_tool())


@pytest.mark.parametrize("how", [ask, streamed])
async def test_stop_reasons_and_usage(how: Any):
    prompt = len(encode("<user>user: 1+1=<end>\n<assistant>"))

    async def look(client: Any) -> None:
        ended = await how(client, USER)
        assert (ended.role, ended.model, ended.stop_reason, ended.stop_sequence) == ("assistant", "m", "end_turn", None)
        assert ended.content[0].text == "it is 3"
        usage = ended.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (prompt - 2, 2, 8)
        cut = await how(client, USER, stop_sequences=["zz", "Obs:"])
        assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("act ", "stop_sequence", "Obs:")
        counted = await client.messages.count_tokens(model="m", messages=USER)
        assert counted.input_tokens == prompt

    found = await messages(Script("it is 3", "act Obs: no"), look)
    assert [trajectory.metadata["requests"] for trajectory in found] == [2, 2], "to count is no request"


async def test_an_answer_without_room_stops_at_max_tokens():
    async def look(client: Any) -> None:
        answer = await ask(client, USER, max_tokens=3)
        assert (answer.content[0].text, answer.stop_reason) == ("abc", "max_tokens")

    await messages(Script("abcdef"), look)


@pytest.mark.parametrize("how", [ask, streamed])
async def test_reasoning_is_a_separate_block_and_may_be_sent_back(how: Any):
    async def look(client: Any) -> None:
        first = await how(client, USER)
        assert [block.type for block in first.content] == ["thinking", "text"]
        assert (first.content[0].thinking, first.content[1].text) == ("well", "2")
        answer = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
        await how(client, [*USER, answer, {"role": "user", "content": "Sure?"}])

    (found,) = await messages(Script("<think>well</think>\n\n2", "yes"), look, separate_reasoning=True)
    assert trained(found) == "<think>well</think>\n\n2<end>yes<end>"


def broken(text: str) -> Any:
    """Returns a tool parser whose calls have arguments that are no JSON object."""
    return "", [ToolCall("add", "[1]")]


@pytest.mark.parametrize("how", [ask, streamed])
async def test_calls_that_do_not_parse_are_text(how: Any):
    async def look(client: Any) -> None:
        answer = await how(client, USER, tools=[ADD])
        assert ([block.text for block in answer.content], answer.stop_reason) == (["add 1"], "end_turn")

    await messages(Script("add 1"), look, tool_parser="tests.extras.agents.test_proxy_anthropic.broken")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image": ({"messages": one(IMAGE)}, "unsupported_value", "messages[0].content[0]"),
    "an image as a result": ({"messages": one(RESULT)}, "unsupported_value", "messages[0].content[0]"),
    "an unknown block": ({"messages": one({"type": "novel"})}, "unsupported_value", "messages[0].content[0]"),
    "a result of nothing": ({"messages": one({"type": "tool_result"})}, "invalid_value", "tool_use_id"),
    "an answer to go on with": ({"messages": one({"type": "text", "text": "a"}, "assistant")}, "invalid_value", ""),
    "a role": ({"messages": [{"role": "system", "content": "a"}]}, "invalid_value", "messages[0].role"),
    "no messages": ({"messages": []}, "invalid_value", "messages"),
    "a tool without a schema": ({"tools": [{"name": "add"}]}, "invalid_value", "tools[0].input_schema"),
    "a tool of the service": ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "unsupported_value", "type"),
    "a choice": ({"tools": [ADD], "tool_choice": {"type": "novel"}}, "unsupported_value", "tool_choice"),
    "a forced tool that is not offered": (
        {"tool_choice": {"type": "tool", "name": "add"}},
        "invalid_value",
        "tool_choice",
    ),
    "a schema": ({"output_config": {"format": {"type": "json_schema"}}}, "unsupported_value", "output_config"),
    "clearing": (
        {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
        "unsupported_value",
        "context_management",
    ),
    "top_k": ({"extra_body": {"top_k": 3}}, "unsupported_parameter", "top_k"),
    "no room": ({"max_tokens": 0}, "invalid_value", "max_tokens"),
}


async def test_unsupported_requests_are_refused_as_errors_of_the_api():
    import anthropic

    engine = Script("2")

    async def look(client: Any) -> None:
        for case, (options, code, param) in REFUSED.items():
            with pytest.raises(anthropic.BadRequestError) as refused:
                await ask(client, USER, **options)
            body: Any = refused.value.body
            reported = (body["type"], body["error"]["type"], body["error"]["code"])
            assert reported == ("error", "invalid_request_error", code), case
            assert param in body["error"]["param"], case
        await ask(client, USER)

    (found,) = await messages(engine, look)
    assert len(engine.received) == 1 and found.metadata["requests"] == 1
    assert found.metadata["errors"] == Counter(code for _, code, _ in REFUSED.values())


async def test_a_stream_that_fails_ends_with_an_error_and_is_no_turn():
    import anthropic

    class Aborted(Script):
        """Its first answer is aborted."""

        async def generate(self, *arguments: Any) -> Any:
            completion = await super().generate(*arguments)
            return replace(completion, finish_reason="abort") if len(self.received) == 1 else completion

    async def look(client: Any) -> None:
        with pytest.raises(anthropic.APIStatusError) as failed:
            await streamed(client, USER)
        assert failed.value.body["error"]["code"] == "aborted"
        await streamed(client, USER)

    (found,) = await messages(Aborted("it", "2"), look)
    assert trained(found) == "2<end>" and found.metadata["errors"] == {"aborted": 1}


async def test_a_retry_of_the_client_is_no_second_turn():
    async def look(client: Any) -> None:
        assert (await ask(client, USER)).content[0].text == "2"

    engine = Script(SlimxError("no", code="test.no"), "2")
    (found,) = await messages(engine, look, retries=2)
    assert len(engine.received) == 2 and trained(found) == "2<end>"


async def test_a_session_that_does_not_exist_is_not_found():
    import anthropic

    async def look(client: Any) -> None:
        await ask(client, USER)
        async with anthropic.AsyncAnthropic(base_url=str(client.base_url).rstrip("/") + "x", api_key="any") as other:
            with pytest.raises(anthropic.NotFoundError) as refused:
                await ask(other, USER)
            assert refused.value.body["error"]["type"] == "not_found_error"

    await messages(Script("2"), look)


async def test_a_compacted_history_makes_several_trajectories_of_one_rollout():
    """The session of a coding agent: two tool turns, a summary in place of the past, and work after it."""

    async def harness(client: Any) -> None:
        history: list[Any] = [{"role": "user", "content": "fix it"}]
        for _ in range(2):
            answer = await ask(client, history, system="code", tools=[ADD])
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "ok"}
            history += [{"role": "assistant", "content": blocks}, *one(result)]
        summary = await ask(client, [*history[:-1], one_more(history[-1])], system="code", tools=[ADD])
        fresh = [{"role": "user", "content": f"so far: {summary.content[0].text}"}]
        await ask(client, fresh, system="code", tools=[ADD])

    def one_more(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": [*message["content"], {"type": "text", "text": "summarize"}]}

    main, after = await messages(Script(f"look {CALL}", f"edit {CALL}", "edited", "done"), harness)
    assert trained(main) == f"look {CALL}<end>edit {CALL}<end>edited<end>" and trained(after) == "done<end>"
    assert text_of(after).endswith("so far: edited<end>\n<assistant>done<end>")
    assert main.rollout_id == after.rollout_id == "g/0" and main.id != after.id
