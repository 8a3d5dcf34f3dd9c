"""Agents and streams against a real server: what is captured is what a hook gets, token for token and bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Prompt, Trajectory
from slimx.engines.server.engine import Engine
from slimx.engines.server.router import Router
from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.agents.proxy.tool_calls import find_parser
from slimx.models.families import read_model
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import RolloutContext, RolloutEngine
from slimx.runtime.ports import free_port
from tests.integration.conftest import ROOT, Weights, perturbed, publish

pytestmark = pytest.mark.integration

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "12+34="}], answer="46")
SAMPLING = {"temperature": 0.8, "top_k": 40, "max_new_tokens": 12, "stop_token_ids": list(range(4, 128, 3))}
"""An untrained model hardly ever ends a turn: one token in three does it here."""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CLOSED = {"type": "object", "required": ["a"], "additionalProperties": False}
CALLS = {
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "glm45_moe": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimik2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
}
"""The same call in the words of several families, by the name of its parser in the router."""
AGAIN = {"role": "user", "content": "Sure?"}


@contextlib.asynccontextmanager
async def rolling(client: GenerationClient, model: Path, **sampling: Any) -> AsyncIterator[RolloutContext]:
    proxy = ChatProxy(context=400)
    try:
        yield RolloutContext(
            engine=RolloutEngine(client, {**SAMPLING, **sampling}, seed=11, routed_experts=True),
            tokenizer=load_tokenizer(model),
            version=0,
            evaluation=False,
            seed=11,
            group_id="g",
            index=0,
            proxy=proxy,
        )
    finally:
        await proxy.stop()


async def two_turns(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Samples the rollout of the agents below, as a hook."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=0))
    draft.add_inserted(ctx.turn(AGAIN["content"], after=draft.token_ids))
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1))
    return draft.finish()


async def plain(base_url: str, prompt: Prompt) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        first = await client.chat.completions.create(model="m", messages=prompt.messages)
        await client.chat.completions.create(model="m", messages=[*prompt.messages, first.choices[0].message, AGAIN])


async def streaming(base_url: str, prompt: Prompt) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        parts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(model="m", messages=prompt.messages, stream=True)
        ]
        messages = [*prompt.messages, {"role": "assistant", "content": "".join(parts)}, AGAIN]
        async for _ in await client.chat.completions.create(model="m", messages=messages, stream=True):
            pass


async def blocking(base_url: str, prompt: Prompt) -> None:
    def ask() -> None:
        with openai.OpenAI(base_url=base_url, api_key="x") as client:
            first = client.chat.completions.create(model="m", messages=prompt.messages)
            client.chat.completions.create(model="m", messages=[*prompt.messages, first.choices[0].message, AGAIN])

    await asyncio.to_thread(ask)


async def anthropic_messages(base_url: str, prompt: Prompt) -> None:
    """Requests a whole message, then a streamed one."""
    import anthropic  # 3 s of a core, which a worker that only collects this file does without

    request = {"model": "m", "max_tokens": 100}
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="x") as client:
        first = await client.messages.create(**request, messages=prompt.messages)
        answer = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        async with client.messages.stream(**request, messages=[*prompt.messages, answer, AGAIN]) as stream:
            assert (await stream.get_final_message()).usage.output_tokens > 0


async def openai_responses(base_url: str, prompt: Prompt) -> None:
    """Requests a whole response, then a streamed one."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        first = await client.responses.create(model="m", input=prompt.messages)
        items = [item.model_dump(exclude_none=True) for item in first.output]
        events = await client.responses.create(model="m", input=[*prompt.messages, *items, AGAIN], stream=True)
        assert [event.type async for event in events][-1] in ("response.completed", "response.incomplete")


def adding(calls: list[Any]) -> None:
    """Asserts that (name, arguments) of `calls` are as their tool wants them."""
    assert calls and all(
        name == "add" and list(arguments) == ["a"] and isinstance(arguments["a"], int) for name, arguments in calls
    )


async def forcing(base_url: str, prompt: Prompt) -> None:
    """Requires a tool call by each API, and asks once without."""
    import anthropic

    tool = {"name": "add", "parameters": {**ADD["function"]["parameters"], **CLOSED}}
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        request = {"model": "m", "messages": prompt.messages, "tools": [{"type": "function", "function": tool}]}
        named = {"type": "function", "function": {"name": "add"}}
        first = (await client.chat.completions.create(**request, tool_choice=named)).choices[0].message
        adding([(call.function.name, json.loads(call.function.arguments)) for call in first.tool_calls])
        request = {"model": "m", "input": prompt.messages, "tools": [{"type": "function", **tool}]}
        second = await client.responses.create(**request, tool_choice="required", parallel_tool_calls=False)
        adding([(item.name, json.loads(item.arguments)) for item in second.output])
        await client.chat.completions.create(model="m", messages=prompt.messages, max_tokens=12)
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="x") as client:
        offered = [{"name": "add", "input_schema": tool["parameters"]}]
        choice = {"type": "any", "disable_parallel_tool_use": True}
        request = {
            "model": "m",
            "max_tokens": 300,
            "messages": prompt.messages,
            "tools": offered,
            "tool_choice": choice,
        }
        async with client.messages.stream(**request) as stream:
            third = await stream.get_final_message()
        adding([(block.name, block.input) for block in third.content])


def assert_equal(found: Trajectory, expected: Trajectory, name: str) -> None:
    for field in ("token_ids", "loss_mask", "logprobs", "routed_experts"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field), f"{name}: {field}")
    for field in ("ids", "counts"):
        np.testing.assert_array_equal(getattr(found.support, field), getattr(expected.support, field), name)
    assert (found.spans, found.sampling, found.status) == (expected.spans, expected.sampling, expected.status), name


async def test_agents_of_the_official_client_are_the_rollout_that_a_hook_makes(
    engine: Engine, tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    await publish(engine, tiny_weights, 3)
    router = Router(free_port(), free_port(), tmp_path / "router.log", keys=engine.spec.keys)
    router.start()
    try:
        await router.wait_ready(30)
        await router.add(engine.spec.url)
        shape, key = ModelShape.of(read_model(tiny_model)), router.keys.api_key
        async with GenerationClient(router.url, shape, api_key=key) as client:
            async with rolling(client, tiny_model) as ctx:
                expected = await two_turns(ctx, PROMPT)
                assert expected.loss_mask.sum() >= 4 and len(expected.spans) == 4
                for program in (plain, streaming, blocking, anthropic_messages, openai_responses):
                    (found,) = await agent.generate(ctx, PROMPT, agent=f"{__name__}.{program.__name__}")
                    assert_equal(found, expected, program.__name__)
                results = set()
                example = (
                    {"agent": "examples.openai_agent.solve"},
                    {"command": [sys.executable, str(ROOT / "examples" / "openai_agent.py")]},
                )
                for options in example:
                    (found,) = await agent.generate(ctx, PROMPT, **options)
                    results.add((found.metadata["result"], found.token_ids.tobytes()))
                assert len(results) == 1, "the agent samples the same in this process and in one of its own"
            # Tools that are forced: log-probs are of what the grammar left to choose from, and nothing is trained.
            free = {"stop_token_ids": [3], "max_new_tokens": 300, "top_k": -1}
            async with rolling(client, tiny_model, **free) as ctx:
                found = await agent.generate(ctx, PROMPT, agent=f"{__name__}.forcing")
                assert [bool(trajectory.loss_mask.any()) for trajectory in found] == [False, False, True, False]
                assert found[0].metadata["forced"] == 3 and ctx.metrics["tool_calls"] == 3
                begin = ctx.tokenizer('<tool_call>\n{"name": "add", "arguments": ').input_ids
                for trajectory in (found[0], found[1], found[3]):
                    (span,) = [span for span in trajectory.spans if span.source == "sampled"]
                    made = slice(span.start, span.start + len(begin))
                    assert trajectory.token_ids[made].tolist() == begin and not trajectory.logprobs[made].any()
                    alone = (await client.score(trajectory.token_ids)).logprobs[made.start - 1 : made.stop - 1]
                    assert alone.max() < -1  # what the model itself gives the same tokens
            for parser, text in CALLS.items():
                content, (call,) = await find_parser(parser, router.url, client.headers)(f"So: {text}", [ADD])
                assert (content, call.name, json.loads(call.arguments)) == ("So:", "add", {"a": 1}), parser
                assert await find_parser(parser, router.url, client.headers)("So: nothing", [ADD]) == (
                    "So: nothing",
                    [],
                )
            # Requests that the server itself refuses, and unsupported ones.
            async with rolling(client, tiny_model) as ctx:
                ctx = replace(ctx, proxy=ChatProxy(context=10_000))
                long = Prompt(id="long", messages=[{"role": "user", "content": "1" * 3000}])
                with pytest.raises(agent.GivenUp, match="BadRequestError"):
                    await agent.generate(ctx, long, agent=f"{__name__}.plain")
                await ctx.proxy.stop()
    finally:
        await router.stop()


class Breaking:
    """A TCP relay to the server that cuts the first `cuts` connections after some bytes of their answer."""

    def __init__(self, url: str, cuts: int, after: int) -> None:
        self.target, self.cuts, self.after = url.removeprefix("http://").split(":"), cuts, after
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self.after if self.cuts > 0 else None
        self.cuts -= 1
        above, below = await asyncio.open_connection(self.target[0], int(self.target[1]))

        async def up() -> None:
            while chunk := await reader.read(65536):
                below.write(chunk)
                await below.drain()

        sending = asyncio.create_task(up())
        try:
            while chunk := await above.read(256):
                if left is not None and (left := left - len(chunk)) < 0:
                    writer.transport.abort()
                    break
                writer.write(chunk)
        finally:
            sending.cancel()
            below.close()
            writer.close()

    async def __aenter__(self) -> Breaking:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


def assert_same(found: Completion, expected: Completion) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-6)
    assert found.finish_reason == expected.finish_reason
    assert (found.routed_experts == expected.routed_experts).mean() > 0.98  # a prefill may break a tie otherwise


async def test_a_stream_samples_what_a_request_does_whole_broken_and_left(
    engine: Engine, tiny_model: Path, tiny_weights: Weights
) -> None:
    await publish(engine, tiny_weights, 4)
    prompt, sampling = [1, 20, 21, 15, 22, 23, 33, 2], {"temperature": 0.7, "max_new_tokens": 60, "ignore_eos": True}
    shape = ModelShape.of(read_model(tiny_model))
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        expected = await client.generate(GenerationRequest(prompt, sampling, 5, routed_experts=True))
        async with client.stream(GenerationRequest(prompt, sampling, 5, routed_experts=True)) as stream:
            sizes = [len(piece.token_ids) async for piece in stream]
            assert len(sizes) > 10 and sum(sizes) == 60
            assert_same(stream.completion, expected)
        async with client.stream(GenerationRequest(prompt, sampling, 5, routed_experts=True)) as stream:
            async for _ in stream:
                if len(stream.completion.token_ids) >= 20:
                    break
        count = len(stream.completion.token_ids)
        assert 20 <= count < 60 and stream.completion.token_ids.tolist() == expected.token_ids[:count].tolist()
        assert len(stream.completion.routed_experts) == len(prompt) + count - 1
    key = engine.spec.keys.api_key
    async with (
        Breaking(engine.spec.url, cuts=2, after=6000) as relay,
        GenerationClient(relay.url, shape, api_key=key) as client,
    ):
        pieces: list[int] = []
        async with client.stream(GenerationRequest(prompt, sampling, 5, routed_experts=True)) as stream:
            async for piece in stream:
                pieces += piece.token_ids.tolist()
                if client.retried == 1 and stream.completion.versions[-1][2] == 4:
                    await publish(engine, perturbed(tiny_weights, 3, scale=0.0), 5)
        assert client.retried == 2 and pieces == expected.token_ids.tolist()
        assert_same(stream.completion, expected)
        assert [version for _, _, version in stream.completion.versions] == [4, 5]
