"""Shared by the tests of the proxy: a run's proxy over an engine in this process, and a tokenizer that knows tools."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from slimx.data.records import Image, Prompt, Trajectory
from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.agents.proxy.tool_calls import ToolCall
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import RolloutContext
from tests.unit.rollout.rollout_stand import rollout_context, the_tokenizer

TEMPLATE = (
    "{% if tools %}{{ '[tools ' + tools|tojson + ']' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<assistant>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments}|tojson }}"
    "</tool_call>{% endfor %}<end>\n"
    "{% else %}<user>{{ m.role + ': ' + m.content }}<end>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Of Qwen's shape: a turn ends with a token and a line break, roles are written out, tool calls are tagged JSON."""
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "1+1="}], answer="2", metadata={"level": 3})
END = 3
USER = list(PROMPT.messages)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'


@functools.cache
def tokenizer() -> Any:
    """One token is one character."""
    out = copy.deepcopy(the_tokenizer())
    out.chat_template = TEMPLATE
    return out


class Script:
    """An engine that says given texts one after the other, and keeps what it was asked."""

    def __init__(self, *texts: str | Exception) -> None:
        self.texts = list(texts)
        self.received: list[tuple[str, dict[str, Any], int]] = []
        self.prompts: list[list[int]] = []
        self.images: list[tuple[Image, ...]] = []
        """Images of each request."""
        self.completions: list[Completion] = []
        self.gate: Any = None
        """Awaited before an answer, if there is one."""
        self.pause = 0.0
        """Seconds between the pieces of a stream."""
        self.left = 0
        """Streams that were not read to their end."""

    async def generate(self, request: GenerationRequest) -> Completion:
        number = len(self.received)
        token_ids, sampling = list(request.token_ids), request.sampling
        self.received.append((tokenizer().decode(token_ids), sampling, request.seed))
        self.prompts.append(token_ids)
        self.images.append(request.images)
        if self.gate is not None:
            await self.gate(number)
        text = self.texts[number]
        if isinstance(text, Exception):
            raise text
        ids = [*tokenizer()(text, add_special_tokens=False).input_ids, END]
        reason = "stop"
        if len(ids) > sampling["max_new_tokens"]:
            ids, reason = ids[: sampling["max_new_tokens"]], "length"
        routes = np.random.default_rng(number).integers(0, 8, (len(token_ids) + len(ids) - 1, 2, 1)).astype(np.uint8)
        out = Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
            versions=[(0, 1, 4), (1, len(ids), 5)] if len(ids) > 1 else [(0, 1, 4)],
            finish_reason=reason,
            routed_experts=routes,
            cached_tokens=2,
            seconds=0.1,
        )
        self.completions.append(out)
        return out

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[Any]:
        stream = Stream(await self.generate(request), self.pause)
        try:
            yield stream
        finally:
            self.left += not stream.read


class Stream:
    """Two tokens at a time."""

    def __init__(self, completion: Completion, pause: float) -> None:
        self.completion, self.pause, self.read = completion, pause, False

    async def __aiter__(self) -> AsyncIterator[Completion]:
        ids = self.completion.token_ids
        for start in range(0, len(ids), 2):
            piece = slice(start, start + 2)
            await asyncio.sleep(self.pause)
            fields = {"versions": [], "finish_reason": "", "routed_experts": None, "cached_tokens": 0, "seconds": 0.1}
            yield Completion(token_ids=ids[piece], logprobs=self.completion.logprobs[piece], **fields)
        self.read = True


def fragile(text: str) -> Any:
    """A tool parser that cannot."""
    raise IndexError(text)


def marked(text: str) -> Any:
    """A tool parser of a model that marks its calls by a special token."""
    content, mark, name = text.partition("<user>")
    return content, [ToolCall(name.removesuffix("<pad>"), "{}")] if mark and name.endswith("<pad>") else []


def context(engine: Any, proxy: ChatProxy | None, **sampling: Any) -> RolloutContext:
    parameters = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 100, **sampling}
    fields = {"tokenizer": tokenizer(), "version": 5, "group_id": "g", "proxy": proxy}
    return rollout_context(engine, parameters, seed=11, routed=True, **fields)


def client_of(base_url: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="any", **{"max_retries": 0, **options})


class Caller:
    """Lets a test's own function be the agent, which the hook names by a dotted path."""

    def __init__(self, *, with_client: bool) -> None:
        self.function: Any = None
        self._with_client = with_client

    async def __call__(self, base_url: str, prompt: Prompt) -> Any:
        if not self._with_client:
            return await self.function(base_url, prompt)
        async with client_of(base_url) as client:
            return await self.function(client, prompt)


call, bare = Caller(with_client=True), Caller(with_client=False)


async def rollout(
    engine: Any, function: Any, *, tokens: int = 1000, sampled: dict[str, Any] | None = None, **options: Any
) -> list[Trajectory]:
    """The trajectories of `async def function(client, prompt)`."""
    call.function = function
    proxy = ChatProxy(context=tokens)
    try:
        return await agent.generate(
            context(engine, proxy, **(sampled or {})),
            PROMPT,
            **{"agent": "tests.extras.agents.proxy_stand.call", **options},
        )
    finally:
        await proxy.stop()


def encode(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False).input_ids


def text_of(trajectory: Trajectory) -> str:
    return tokenizer().decode(trajectory.token_ids.tolist())


def trained(trajectory: Trajectory) -> str:
    return tokenizer().decode(trajectory.token_ids[trajectory.loss_mask == 1].tolist())


async def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=messages, **options)


async def chat(client: Any, messages: list[Any], **options: Any) -> Any:
    return (await ask(client, messages, **options)).choices[0].message


def assert_equal(found: Trajectory, expected: Trajectory) -> None:
    for name in ("token_ids", "loss_mask", "logprobs", "routed_experts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    for name in ("spans", "sampling", "id", "rollout_id", "group_id", "index", "status", "finish_reason", "turns"):
        assert getattr(found, name) == getattr(expected, name), name


ANSWERS = (f"so {CALL}", "it is 2")
"""What the engine says in a conversation with a tool."""


def assert_as_by_chat_completions(found: Trajectory, expected: Trajectory) -> None:
    """Assert that an agent of another API, whose engine said ANSWERS, made the rollout of `with_a_tool`."""
    assert_equal(found, expected)
    assert trained(found) == f"so {CALL}<end>it is 2<end>"


async def with_a_tool() -> Trajectory:
    """The rollout of an agent that asks chat completions twice, with a tool's result in between."""

    async def converse(client: Any, prompt: Any) -> None:
        messages = [{"role": "system", "content": "Count."}, *USER]
        first = await chat(client, messages, tools=TOOLS)
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}
        await chat(client, [*messages, first, result], tools=TOOLS)

    (found,) = await rollout(Script(*ANSWERS), converse)
    return found
