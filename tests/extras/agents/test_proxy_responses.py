"""Agents that speak to OpenAI's responses API are the rollouts that chat completions would have made."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import openai
import pytest

from slimx.errors import SlimxError
from tests.extras.agents.proxy_stand import (
    ANSWERS,
    CALL,
    TOOLS,
    USER,
    Script,
    assert_as_by_chat_completions,
    client_of,
    encode,
    rollout,
    text_of,
    trained,
    with_a_tool,
)

ADD = {"type": "function", **TOOLS[0]["function"], "strict": False}
"""The tool of TOOLS in this API's words."""


async def ask(client: Any, input_items: Any, **options: Any) -> Any:
    return await client.responses.create(model="m", input=input_items, **options)


async def streamed(client: Any, input_items: Any, **options: Any) -> Any:
    """Returns the response at the end of a stream, whose events agree with it."""
    text, calls, items, last = "", "", [], None
    numbers = []
    async for event in await client.responses.create(model="m", input=input_items, stream=True, **options):
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.function_call_arguments.delta":
            calls += event.delta
        elif event.type == "response.output_item.done":
            items.append(event.item)
        elif event.type in ("response.completed", "response.incomplete", "response.failed"):
            last = event.response
    assert numbers == list(range(len(numbers)))
    assert text == last.output_text and items == last.output
    assert calls == "".join(item.arguments for item in last.output if item.type == "function_call")
    return last


def dumped(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in response.output]


@pytest.mark.parametrize("how", [ask, streamed])
async def test_a_conversation_with_tools_is_captured_as_that_of_chat_completions(how: Any):
    async def with_responses(client: Any, prompt: Any) -> None:
        first = await how(client, USER, instructions="Count.", tools=[ADD])
        assert [item.type for item in first.output] == ["message", "function_call"] and first.output_text == "so"
        call = first.output[1]
        assert (call.name, call.arguments, first.status) == ("add", '{"a": 1, "b": "x"}', "completed")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        second = await how(client, [*USER, *dumped(first), result], instructions="Count.", tools=[ADD])
        assert second.output_text == "it is 2"

    (found,) = await rollout(Script(*ANSWERS), with_responses)
    assert_as_by_chat_completions(found, await with_a_tool())


@pytest.mark.parametrize("how", [ask, streamed])
async def test_status_and_usage(how: Any):
    prompt = len(encode("<user>user: 1+1=<end>\n<assistant>"))

    async def look(client: Any, _: Any) -> None:
        answer = await how(client, "1+1=")
        assert (answer.object, answer.model, answer.status, answer.output_text) == (
            "response",
            "m",
            "completed",
            "it is 3",
        )
        usage = answer.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, 8, prompt + 8)
        assert usage.input_tokens_details.cached_tokens == 2
        cut = await how(client, USER, max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert cut.output_text == "it "

    await rollout(Script("it is 3", "it is 3"), look)


async def test_the_clients_stream_reader_understands_the_events():
    async def look(client: Any, prompt: Any) -> None:
        async with client.responses.stream(model="m", input=USER, tools=[ADD]) as stream:
            answer = await stream.get_final_response()
        assert answer.output_text == "so" and answer.output[1].arguments == '{"a": 1, "b": "x"}'

    await rollout(Script(f"so {CALL}"), look)


@pytest.mark.parametrize("how", [ask, streamed])
async def test_reasoning_is_a_separate_item_and_may_be_sent_back(how: Any):
    async def look(client: Any, prompt: Any) -> None:
        first = await how(client, USER)
        assert [item.type for item in first.output] == ["reasoning", "message"]
        assert first.output[0].content[0].text == "well" and first.output_text == "2"
        await how(client, [*USER, *dumped(first), {"role": "user", "content": "Sure?"}])

    (found,) = await rollout(Script("<think>well</think>\n\n2", "yes"), look, separate_reasoning=True)
    assert trained(found) == "<think>well</think>\n\n2<end>yes<end>"


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image": ({"input": [IMAGE]}, "unsupported_value", "input[0].content"),
    "an unknown item": ({"input": [{"type": "novel"}]}, "unsupported_value", "input[0]"),
    "no input": ({"input": []}, "invalid_value", "input"),
    "only reasoning": ({"input": [{"type": "reasoning"}]}, "invalid_value", "input"),
    "an answer last": ({"input": [{"role": "assistant", "content": "a"}]}, "invalid_value", "input"),
    "a call of nothing": ({"input": [{"type": "function_call"}]}, "invalid_value", "input[0]"),
    "a result of nothing": ({"input": [{"type": "function_call_output"}]}, "invalid_value", "input[0].call_id"),
    "a tool of the service": ({"tools": [{"type": "file_search"}]}, "unsupported_value", "tools[0].type"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "invalid_value", "tools[0].name"),
    "a choice": ({"tools": [ADD], "tool_choice": {"type": "mcp"}}, "unsupported_value", "tool_choice"),
    "a forced tool without tools": ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    "a stored response": ({"previous_response_id": "resp_0"}, "unsupported_parameter", "previous_response_id"),
    "an inclusion": ({"include": ["message.output_text.logprobs"]}, "unsupported_value", "include"),
    "a schema": ({"text": {"format": {"type": "json_object"}}}, "unsupported_value", "text"),
    "no room": ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
}


async def test_unsupported_requests_are_refused_as_errors_of_the_api():
    async def look(client: Any, prompt: Any) -> None:
        for case, (options, code, param) in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**{"model": "m", "input": "a", **options})
            assert (refused.value.code, refused.value.param) == (code, param), case
        await ask(client, USER)

    engine = Script("2")
    (found,) = await rollout(engine, look)
    assert len(engine.received) == 1 and found.metadata["requests"] == 1
    assert found.metadata["errors"] == Counter(code for _, code, _ in REFUSED.values())


async def test_a_retry_and_a_stream_that_fails_are_no_turns():
    class Aborted(Script):
        """Its first answer is aborted."""

        async def generate(self, *arguments: Any) -> Any:
            completion = await super().generate(*arguments)
            return replace(completion, finish_reason="abort") if len(self.received) == 1 else completion

    async def look(client: Any, prompt: Any) -> None:
        events = [event async for event in await client.responses.create(model="m", input=USER, stream=True)]
        assert (events[-1].type, events[-1].response.error.code) == ("response.failed", "aborted")
        async with client_of(str(client.base_url), max_retries=1) as patient:
            assert (await ask(patient, USER)).output_text == "3"

    (found,) = await rollout(Aborted("it", SlimxError("no", code="test.no"), "3"), look)
    assert trained(found) == "3<end>" and text_of(found).endswith("3<end>")
