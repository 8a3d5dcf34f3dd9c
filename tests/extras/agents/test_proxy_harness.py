"""Sessions of whole harnesses: a coding agent with sub-agents, compaction and branches; what such programs send by
default; tools that they force."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import xgrammar

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.rollout.hooks import GivenUp
from tests.extras.agents.proxy_stand import (
    CALL,
    PROMPT,
    TOOLS,
    USER,
    Script,
    ask,
    bare,
    chat,
    context,
    rollout,
    text_of,
    trained,
)

SESSION = json.loads((Path(__file__).parent / "recorded" / "coding_session.json").read_text())
"""A coding agent's session, written down step by step: who asks (`thread`), what is new in the request (`results` of
the calls before it, `text`), and what the model says. A thread that begins may copy another (`from`, up to `keep`
messages, with the results of the messages `clear` taken away), or go on from its summary."""
TITLE, MAIN, EXPLORER, COMPACTED, REWOUND, CLEARED = "title", "main", "explorer", "compacted", "rewound", "cleared"
DEFAULTS: dict[str, Any] = {
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "somebody"},
}
"""Parameters that a harness of Anthropic's API sends with every request."""


def as_shown(answer: str) -> str:
    """Returns an answer without the space around its text."""
    text, begin, call = answer.partition("<tool_call>")
    return text.strip() + begin + call


class Thread:
    """One conversation of the harness: the API's messages, and what the model must have been given as text."""

    def __init__(self, step: dict[str, Any], others: dict[str, Thread]) -> None:
        parent = others.get(step.get("from", ""))
        self.system = parent.system if parent else step.get("system", SESSION["system"])
        self.tools = parent.tools if parent else step.get("tools", SESSION["tools"])
        self.messages = json.loads(json.dumps(parent.messages[: step.get("keep")])) if parent else []
        for number in step.get("clear", ()):
            for block in self.messages[number]["content"]:
                block["content"] = "[cleared]"
        self.answers: list[str] = parent.answers[: len(self.messages) // 2] if parent else []
        # Behind what it cleared the past is another one: answers there are as the harness shows them.
        first = min(step["clear"]) // 2 if "clear" in step else len(self.answers)
        self.answers[first:] = map(as_shown, self.answers[first:])

    def asks(self, step: dict[str, Any], summary: str) -> list[dict[str, Any]]:
        """Returns the messages of the next request; the last is marked for the service's cache, as harnesses do."""
        blocks = []
        if results := step.get("results"):
            calls = [block["id"] for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
            pairs = zip(calls, results, strict=True)
            blocks = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in pairs]
        if text := step.get("text"):
            blocks.append({"type": "text", "text": text.replace("{summary}", summary)})
        self.messages.append({"role": "user", "content": blocks})
        marked = {**blocks[-1], "cache_control": {"type": "ephemeral"}}
        return [*self.messages[:-1], {"role": "user", "content": [*blocks[:-1], marked]}]

    def text(self) -> str:
        """Returns all tokens as text, in which what was sampled is unchanged."""
        out = "".join(self._prompt())
        return out.removesuffix("\n")

    def _prompt(self) -> Iterator[str]:
        if self.tools:
            functions = [
                {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}
                 | {"description": t["description"]}}
                for t in self.tools
            ]  # fmt: skip
            yield f"[tools {json.dumps(functions)}]"
        yield f"<user>system: {self.system}<end>\n"
        for message, answer in zip(self.messages[::2], self.answers, strict=True):
            for block in message["content"]:
                yield f"<user>{'tool: ' + block['content'] if 'content' in block else 'user: ' + block['text']}<end>\n"
            yield f"<assistant>{answer}<end>\n"


async def test_a_coding_agents_session_has_a_trajectory_per_history():
    import anthropic  # 3 s of a core, which a worker that only collects this file does without

    threads: dict[str, Thread] = {}
    steps = SESSION["steps"]

    async def harness(base_url: str, prompt: Any) -> str:
        base = base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=2) as client:
            for number, step in enumerate(steps):
                thread = threads.setdefault(step["thread"], Thread(step, threads))
                summary = threads[step["summary"]].answers[-1] if "summary" in step else ""
                params = {
                    "model": "m",
                    "system": [{"type": "text", "text": thread.system, "cache_control": {"type": "ephemeral"}}],
                    "messages": thread.asks(step, summary),
                    **({"tools": thread.tools} if thread.tools else {}),
                }
                if number % 10 == 0:
                    counted = await client.messages.count_tokens(**params)
                async with client.messages.stream(**params, max_tokens=1000, extra_body=DEFAULTS) as stream:
                    answer = await stream.get_final_message()
                if number % 10 == 0:
                    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
                blocks = [block.model_dump(exclude_none=True) for block in answer.content]
                for block in blocks:  # as harnesses do, which show answers without the space around them
                    if block["type"] == "text":
                        block["text"] = block["text"].strip()
                thread.messages.append({"role": "assistant", "content": blocks})
                thread.answers.append(step["answer"])
        return "done"

    script: list[Any] = [step["answer"] for step in steps]
    script.insert(7, SlimxError("an engine is gone", code="test.no"))  # the client asks again
    engine = Script(*script)
    bare.function, proxy = harness, ChatProxy(context=40_000)
    try:
        ctx = context(engine, proxy, max_new_tokens=1000)
        options = {"agent": "tests.extras.agents.proxy_stand.bare", "max_requests": 100}
        found = await agent.generate(ctx, PROMPT, **options)
    finally:
        await proxy.stop()
    # Trajectories come in the order of their last answers.
    order = [TITLE, EXPLORER, MAIN, COMPACTED, REWOUND, CLEARED]
    assert [text_of(trajectory) for trajectory in found] == [threads[name].text() for name in order]
    answers = {name: [step["answer"] for step in steps if step["thread"] == name] for name in order}
    # A branch trains what is its own; what it shares with the one before is context.
    assert [trained(trajectory) for trajectory in found] == [
        "".join(a + "<end>" for a in answers[name]) for name in order
    ]
    assert {trajectory.rollout_id for trajectory in found} == {"g/0"}
    assert len({trajectory.id for trajectory in found}) == len(order)
    # Each sampled token has the log-prob that the engine returned, in every trajectory, and is trained exactly once.
    finished = [completion for completion in engine.completions if completion.finish_reason]
    trained_tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in found)
    assert trained_tokens == sum(len(completion.token_ids) for completion in finished)
    for trajectory in found:
        spans = [span for span in trajectory.spans if span.source == "sampled"]
        assert np.isfinite(np.concatenate([trajectory.logprobs[s.start : s.stop] for s in spans])).all()
        assert trajectory.loss_mask.sum() <= sum(span.stop - span.start for span in spans)
    rewound, cleared = found[4], found[5]
    assert rewound.loss_mask.sum() < sum(s.stop - s.start for s in rewound.spans if s.source == "sampled")
    assert "[cleared]" in text_of(cleared)
    metadata = found[0].metadata
    assert metadata["requests"] == len(steps) + 1 and metadata["errors"] == {"engine_failed": 1}
    assert metadata["overridden"] == ["output_config.effort", "thinking"] and metadata["result"] == "done"
    calls = sum(step["answer"].count("<tool_call>") for step in steps)
    assert ctx.metrics == {"tool_calls": calls, "unreadable_calls": 0.0}


CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "extra_body": {"client_metadata": {"installation": "x"}},
}
"""Parameters that a harness of OpenAI's responses sends with every request."""


async def test_default_parameters_of_a_harness_are_listed_as_overridden():
    shell = {"type": "function", **TOOLS[0]["function"], "strict": False}
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}

    async def harness(client: Any, prompt: Any) -> None:
        items: list[Any] = [developer, {"type": "message", **USER[0]}]
        tools = [shell, {"type": "web_search", "external_web_access": False}]
        for _ in range(2):
            async with client.responses.stream(model="m", input=items, tools=tools, **CODEX) as stream:
                answer = await stream.get_final_response()
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            items += [
                {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
                *(
                    {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
                    for item in answer.output
                    if item.type == "function_call"
                ),
            ]

    engine = Script(f"so {CALL}", "it is 2")
    (found,) = await rollout(engine, harness)
    assert trained(found) == f"so {CALL}<end>it is 2<end>" and "web_search" not in engine.received[0][0]
    assert found.metadata["overridden"] == ["include", "reasoning", "text.verbosity", "tools.web_search"]


def matcher(grammar: str) -> Callable[[str], bool]:
    """Tells whether a text is one of the grammar's."""
    letters = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(1, 128)] + [b"<end>"], stop_token_ids=[127])
    compiled = xgrammar.GrammarCompiler(letters).compile_grammar(grammar)

    def matches(text: str) -> bool:
        found = xgrammar.GrammarMatcher(compiled)
        return found.accept_string(text) and found.accept_token(127)

    return matches


def forced_asks() -> Iterator[tuple[str, Any, tuple[str, ...], bool]]:
    """Yields name, request by (url, client of its API), and tools that may be called, once."""
    add, sub = TOOLS[0]["function"], {"name": "sub", "parameters": {"type": "object"}}

    def chat(choice: Any, **options: Any) -> Any:
        tools = [{"type": "function", "function": function} for function in (add, sub)]
        return lambda client: ask(client, USER, tools=tools, tool_choice=choice, **options)

    def responses(choice: Any) -> Any:
        tools = [{"type": "function", **function} for function in (add, sub)]
        return lambda client: client.responses.create(model="m", input=USER, tools=tools, tool_choice=choice)

    def messages(choice: Any, *, stream: bool = False) -> Any:
        tools = [{"name": function["name"], "input_schema": function["parameters"]} for function in (add, sub)]

        async def asks(client: Any) -> None:
            import anthropic

            base = str(client.base_url).rstrip("/").removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as anthropic_client:
                params = {"model": "m", "max_tokens": 100, "messages": USER, "tools": tools, "tool_choice": choice}
                if not stream:
                    answer = await anthropic_client.messages.create(**params)
                else:
                    async with anthropic_client.messages.stream(**params) as events:
                        answer = await events.get_final_message()
                assert [block.type for block in answer.content] == ["tool_use"] and answer.stop_reason == "tool_use"

        return asks

    named = {"type": "function", "function": {"name": "add"}}
    yield "chat required", chat("required"), ("add", "sub"), False
    yield "chat required once", chat("required", parallel_tool_calls=False), ("add", "sub"), True
    yield "chat named", chat(named), ("add",), True
    yield "responses required", responses("required"), ("add", "sub"), False
    yield "responses named", responses({"type": "function", "name": "add"}), ("add",), True
    yield "messages any", messages({"type": "any"}), ("add", "sub"), False
    yield "messages any once", messages({"type": "any", "disable_parallel_tool_use": True}), ("add", "sub"), True
    yield "messages tool", messages({"type": "tool", "name": "add"}), ("add",), True
    yield "messages streamed", messages({"type": "tool", "name": "add"}, stream=True), ("add",), True


@pytest.mark.parametrize(("asks", "names", "once"), [pytest.param(*case, id=name) for name, *case in forced_asks()])
async def test_forced_tools_ask_for_a_grammar_and_their_tokens_are_not_trained(asks: Any, names: Any, once: bool):
    engine = Script(CALL, "2")

    async def forces(client: Any, prompt: Any) -> None:
        await asks(client)
        await chat(client, [{"role": "user", "content": "and now?"}])

    forced, free = await rollout(engine, forces)
    matches = matcher(engine.received[0][1]["ebnf"])
    calls = {name: f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("add", "sub")}
    assert {name for name, call in calls.items() if matches(call)} == set(names)
    first = calls[names[0]]
    assert matches(f"{first}\n{first}") is not once
    assert not matches("") and not matches("so " + first) and not matches(first.replace("{}", "[]"))
    assert "ebnf" not in engine.received[1][1]
    assert (trained(forced), trained(free)) == ("", "2<end>") and text_of(forced).endswith(f"{CALL}<end>")
    assert forced.metadata["forced"] == free.metadata["forced"] == 1


def nested(levels: int) -> Any:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def one(schema: Any = None, **fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "add", **({"parameters": schema} if schema else {}), **fields}}]


FORCED: dict[str, tuple[dict[str, Any], str]] = {
    "no tools": ({"tools": []}, "tool_choice"),
    "no such tool": ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
    "no name": ({"tools": [{"type": "function"}]}, "tools[0]"),
    "no object": ({"tools": one({"type": "array"})}, "tools[0].function.parameters"),
    "too deep": ({"tools": one(nested(40))}, "tools[0].function.parameters"),
    "no grammar": ({"tools": one({"type": "object", "properties": {"a": {"type": "nope"}}})}, "tools"),
    "too long": ({"tools": one({"description": "x" * 70_000})}, "tools[0].function.parameters"),
}


async def test_an_unenforceable_tool_choice_is_refused_before_sampling():
    async def look(client: Any, prompt: Any) -> None:
        for case, (options, param) in FORCED.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, USER, **{"tools": TOOLS, "tool_choice": "required", **options})
            assert (refused.value.code, refused.value.param) == ("invalid_value", param), case
        await chat(client, USER)

    engine = Script("2")
    (found,) = await rollout(engine, look, tokens=100_000)
    assert len(engine.received) == 1 and found.metadata["errors"] == {"invalid_value": len(FORCED)}


async def test_an_engine_that_pays_no_heed_to_a_grammar_is_found_out():
    async def look(client: Any, prompt: Any) -> None:
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(client, USER, tools=TOOLS, tool_choice="required")
        assert (refused.value.status_code, refused.value.code) == (502, "engine_failed")
        await chat(client, USER)

    (found,) = await rollout(Script("I would rather talk", "2"), look)
    assert trained(found) == "2<end>" and found.metadata["errors"] == {"engine_failed": 1}


async def test_tools_are_forced_for_parsers_with_a_grammar_only():
    async def look(client: Any, prompt: Any) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, USER, tools=TOOLS, tool_choice="required")
        assert (refused.value.code, refused.value.param) == ("unsupported_value", "tool_choice")
        await chat(client, USER)

    (found,) = await rollout(Script("2"), look, tool_parser="tests.extras.agents.proxy_stand.marked")
    assert found.metadata["errors"] == {"unsupported_value": 1}


async def test_an_agent_that_forces_every_answer_is_dropped():
    async def forces(client: Any, prompt: Any) -> None:
        await ask(client, USER, tools=TOOLS, tool_choice="required")

    with pytest.raises(GivenUp) as caught:
        await rollout(Script(CALL), forces)
    assert caught.value.reason == "agent without trained answers"


async def test_unreadable_calls_and_abandoned_requests_are_counted():
    begun = asyncio.Event()

    async def gate(number: int) -> None:
        if number == 2:
            begun.set()
            await asyncio.Event().wait()

    async def look(base_url: str, prompt: Any) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            assert (await chat(client, USER, tools=TOOLS)).tool_calls is None
            assert (await chat(client, USER)).content == "<tool_call>{"  # no tools were offered: text
            left = asyncio.create_task(chat(client, USER))
            await begun.wait()
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)

    engine = Script('<tool_call>{"name": "add"', "<tool_call>{", "never")
    engine.gate = gate
    bare.function, proxy = look, ChatProxy(context=1000)
    try:
        ctx = context(engine, proxy)
        found: list[Trajectory] = await agent.generate(ctx, PROMPT, agent="tests.extras.agents.proxy_stand.bare")
    finally:
        await proxy.stop()
    assert ctx.metrics == {"tool_calls": 0.0, "unreadable_calls": 1.0}
    assert Counter(found[0].metadata["errors"]) == Counter({"agent_left": 1})
