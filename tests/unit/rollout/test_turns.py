"""Turns behind calls and thinking, by templates of the forms of gpt-oss and Kimi-K2."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slimx.data.chat.messages import with_text
from slimx.data.chat.tokens import check_prompts, encode_turns
from slimx.data.records import Prompt
from slimx.extras.agents import tools
from slimx.extras.agents.proxy.answer import message_calls, split_after_thinking
from slimx.extras.agents.proxy.tool_calls import ToolCall, gpt_oss, hermes
from slimx.rollout.hooks import GivenUp
from tests.extras.agents.proxy_stand import CALL, PROMPT, TEMPLATE, Script, ask, chat, rollout, text_of, tokenizer
from tests.refusals import refused

CALLS = [{"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
RESULT = {"role": "tool", "content": "sun", "tool_call_id": "functions.add:0"}
GPT_OSS = (
    "{% set last = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not last.name %}{{ raise_exception('no call before') }}{% endif %}"
    "<user>functions.{{ last.name }}: {{ m.content|tojson }}<end>"
    "{% elif m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}"
    "<assistant>to {{ last.name }} {{ m.tool_calls[0].function.arguments|tojson }}<end>"
    "{% elif m.role == 'assistant' %}{% set last.name = '' %}<assistant>final {{ m.content }}<end>"
    "{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
KIMI = TEMPLATE.replace("{{ m.role + ': ' + m.content }}", "{{ m.role }} {{ m.tool_call_id }}: {{ m.content }}")


def with_chat(template: str) -> Any:
    out = copy.deepcopy(tokenizer())
    out.chat_template = template
    return out


END = tokenizer().eos_token_id


def behind(template: str, *messages: dict[str, Any], calls: Any = ()) -> str:
    chat_tokenizer = with_chat(template)
    return chat_tokenizer.decode(encode_turns(chat_tokenizer, messages, after=[END], calls=calls))


def test_results_are_rendered_behind_the_calls_that_they_answer():
    assert behind(GPT_OSS, RESULT, calls=CALLS) == '<user>functions.add: "sun"<end><assistant>'
    assert behind(KIMI, RESULT, calls=CALLS) == "\n<user>tool functions.add:0: sun<end>\n<assistant>"
    with refused("tokenizer.template"):
        behind(GPT_OSS, RESULT)


def test_a_turn_that_the_template_leaves_out_is_refused():
    silent = TEMPLATE.replace("{% else %}<user>", "{% elif m.role != 'tool' %}<user>")
    with refused("tokenizer.template"):
        behind(silent, RESULT, calls=CALLS)
    assert behind(silent, {"role": "user", "content": "sun"}) == "\n<user>user: sun<end>\n<assistant>"


def test_ids_that_the_model_wrote_are_kept_if_they_tell_its_calls_apart():
    calls = [ToolCall("f", "{}", "functions.f:0"), ToolCall("f", "{}", "functions.f:1")]
    assert [call["id"] for call in message_calls(calls, 3)] == ["functions.f:0", "functions.f:1"]
    assert [call["id"] for call in message_calls([calls[0], calls[0]], 3)] == ["call_3_0", "call_3_1"]
    assert [call["id"] for call in message_calls([calls[0], ToolCall("f", "{}")], 3)] == ["call_3_0", "call_3_1"]


async def test_results_carry_the_ids_of_the_answer_where_an_agent_has_others():
    async def converse(client: Any, prompt: Any) -> None:
        tool = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        first = (await chat(client, PROMPT.messages, tools=tool)).model_dump(exclude_none=True)
        first["tool_calls"][0]["id"] = "toolu_9"
        await ask(client, [*PROMPT.messages, first, {**RESULT, "tool_call_id": "toolu_9"}], tools=tool)

    call = '<tool_call>{"id": "functions.add:7", "name": "add", "arguments": {}}</tool_call>'
    old = tokenizer().chat_template
    tokenizer().chat_template = KIMI
    try:
        (found,) = await rollout(Script(call, "2"), converse)
    finally:
        tokenizer().chat_template = old
    assert "<user>tool functions.add:7: sun<end>" in text_of(found)


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        (f"<think>I could {CALL}</think>It is 2.", False, "It is 2."),
        (f"I could {CALL}</think>\n\nIt is 2.", True, "It is 2."),
        (f"I could {CALL}", True, ""),
        (f"<think>I could {CALL}", False, ""),
        (f"<think>a</think>b<think>{CALL}</think>c", False, "c"),
        (f"<think>a</think>{CALL}", False, CALL),
        ('<think>a</think><tool_call>"</think>"', False, '<tool_call>"</think>"'),
        (CALL, False, CALL),
    ],
)
def test_reasoning_is_no_part_of_the_answer(text, opened, answer):
    thought, found = split_after_thinking(text, opened=opened)
    assert found == answer and thought + found == text


def test_calls_are_read_whole_or_not_at_all():
    parameters = '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>'
    assert hermes(parameters) == ("", [ToolCall("f", '{"a": 1}')])
    assert hermes('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>') == (
        "",
        [ToolCall("f", '{"a": "</tool_call>"}')],
    )
    for half in ('{"name": "f", "args": {}}', '{"name": "f", "arguments": {}, "parameters": {}}', '{"name": "f"} x'):
        assert hermes(f"<tool_call>{half}</tool_call>")[1] == [], half
    harmony = (
        "<|channel|>analysis<|message|>to=functions.g<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    )
    assert gpt_oss(f'{harmony}<|constrain|>json<|message|>{{"a": 1}}<|call|>') == ("", [ToolCall("f", '{"a": 1}')])
    assert gpt_oss(f"{harmony}<|message|>{{")[1] == []


def test_content_is_one_text_that_the_model_sees():
    parts = [{"type": "text", "text": "HEL"}, {"type": "text", "text": "LO"}]
    assert with_text([{"role": "user", "content": parts}], "f")[0]["content"] == "HELLO"
    calls = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert with_text([calls, RESULT], "f")[0]["content"] == ""
    for content in (None, 5, [{"type": "image"}], ["HELLO"]):
        with refused("prompts.content", about="f"):
            with_text([{"role": "user", "content": content}], "f")
    with refused("prompts.last_turn", about="f"):
        with_text([*PROMPT.messages, {"role": "assistant", "content": "2"}], "f")


def test_a_prompt_of_which_a_turn_is_not_rendered_is_refused():
    silent = with_chat(TEMPLATE.replace("{% else %}<user>", "{% elif m.role != 'system' %}<user>"))
    several = [{"role": "system", "content": "1"}, {"role": "user", "content": "11"}]
    check_prompts(tokenizer(), [Prompt(id="q", messages=several)], "f", 99, 999)
    with refused("prompts.template", about="q"):
        check_prompts(silent, [Prompt(id="q", messages=[{**several[0], "content": "2"}, several[1]])], "f", 99, 999)
    strips = with_chat(TEMPLATE.replace("m.content }}<end>", "m.content.replace('x', '') }}<end>"))
    check_prompts(strips, [Prompt(id="q", messages=[{"role": "user", "content": "axb"}])], "f", 99, 999)


async def test_tools_that_leave_no_room_give_the_rollout_up_for_its_context():
    from tests.extras.agents.tool_stand import context

    ctx, _ = context("never")
    with pytest.raises(GivenUp) as caught:
        await tools.generate(ctx, PROMPT, toolbox="tests.unit.rollout.test_turns.Adding", max_context=30)
    assert caught.value.reason == "context"


async def test_a_call_in_the_thinking_is_not_made():
    from tests.extras.agents.tool_stand import context

    ctx, script = context(f"<think>I could {CALL}</think>It is 2.")
    found = await tools.generate(ctx, PROMPT, toolbox="tests.unit.rollout.test_turns.Adding")
    assert (found.metadata["ended"], found.metadata["tool_calls"], len(script.received)) == ("done", 0, 1)


class Adding:
    """A toolbox of one tool."""

    async def open(self, prompt: Prompt, seed: int) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    async def call(self, name: str, arguments: Any) -> tools.ToolResult:
        return tools.ToolResult(text="2")

    async def judge(self, messages: Any) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass
