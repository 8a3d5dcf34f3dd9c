"""Images in later turns against a real server: hooks and agents of all APIs get the same trajectory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.torch import load_file

from slimx.config.load import load_config
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Prompt, Trajectory
from slimx.engines.server.engine import Engine
from slimx.engines.server.spec import EngineSpec
from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.served_models.client import FrozenEngine
from slimx.extras.vision.prompts.prepare import Preparation
from slimx.models.families import read_model
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.hooks import RolloutContext, RolloutEngine
from tests.integration.conftest import START_S, publish
from tests.integration.engine_families import make_model
from tests.integration.pictures import LOOK, STRAY, content, png, uri
from tests.integration.runs import write_config

pytestmark = pytest.mark.integration

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "<image>Look."}], metadata={"images": [uri(1)]})
SAMPLING = {"temperature": 1.0, "max_new_tokens": 24}


async def hook(ctx: RolloutContext) -> Trajectory:
    """Samples the rollout of the agents below."""
    draft = ctx.draft(PROMPT)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, images=draft.images))
    parts = [{"type": "image", "image": png(2)}, {"type": "text", "text": LOOK}]
    token_ids, images = await ctx.turn_with_images(parts, after=draft.token_ids)
    draft.add_inserted(token_ids, images=images)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1, images=draft.images))
    return draft.finish()


async def chat(base_url: str, prompt: Prompt) -> None:
    """Requests a whole completion, then a streamed one."""
    messages: list[Any] = [{"role": "user", "content": content(1, "Look.")}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": content(2, LOOK)}]
        async for _ in await client.chat.completions.create(model="m", messages=messages, stream=True):
            pass


async def responses(base_url: str, prompt: Prompt) -> None:
    def user(seed: int, text: str) -> Any:
        parts = [{"type": "input_image", "image_url": uri(seed)}, {"type": "input_text", "text": text}]
        return {"role": "user", "content": parts}

    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        first = await client.responses.create(model="m", input=[user(1, "Look.")])
        items = [item.model_dump(exclude_none=True) for item in first.output]
        await client.responses.create(model="m", input=[user(1, "Look."), *items, user(2, LOOK)])


async def anthropic_messages(base_url: str, prompt: Prompt) -> None:
    import anthropic  # 3 s of a core, which a worker that only collects this file does without

    def user(seed: int, text: str) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": uri(seed).partition(",")[2]}
        return {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text}]}

    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="x") as client:
        request = {"model": "m", "max_tokens": 100}
        first = await client.messages.create(**request, messages=[user(1, "Look.")])
        answer = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        counted = await client.messages.count_tokens(model="m", messages=[user(1, "Look."), answer, user(2, LOOK)])
        second = await client.messages.create(**request, messages=[user(1, "Look."), answer, user(2, LOOK)])
        assert counted.input_tokens == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


@contextlib.asynccontextmanager
async def rolling(directory: Path) -> AsyncIterator[tuple[GenerationClient, RolloutContext]]:
    """Serves the tiny Qwen3-VL; yields its client and the context of a rollout."""
    model = directory / "model"
    make_model("qwen3_vl", model)
    config = load_config(write_config(directory, model, directory / "none", trainer={"vision": {"processes": 1}}))
    spec = read_model(model)
    engine = Engine(
        EngineSpec("vision", str(model), "float32", "cpu", max_total_tokens=4096, routed_experts=False),
        directory / "server.log",
    )
    preparation = Preparation(config, spec)
    proxy = ChatProxy(context=400, images=True)
    key = engine.spec.keys.api_key
    try:
        await engine.start(START_S)
        await publish(engine, load_file(model / "model.safetensors"), 1)
        async with GenerationClient(
            engine.spec.url, ModelShape.of(spec), api_key=key, images=str(config.images)
        ) as client:
            tokenizer = load_tokenizer(model)
            prompt_ids = preparation.prompt_ids(tokenizer)
            await prompt_ids.prepare(PROMPT)
            yield (
                client,
                RolloutContext(
                    engine=RolloutEngine(client, SAMPLING, seed=11, routed_experts=False),
                    tokenizer=tokenizer,
                    version=0,
                    evaluation=False,
                    seed=11,
                    group_id="g",
                    index=0,
                    proxy=proxy,
                    prompt_ids=prompt_ids,
                ),
            )
    finally:
        await proxy.stop()
        preparation.close()
        await engine.stop()


async def test_hooks_and_agents_show_images_in_later_turns(tmp_path: Path) -> None:
    async with rolling(tmp_path) as (client, ctx):
        expected = await hook(ctx)
        assert len({image.digest for image in expected.images}) == 2
        sampled = np.isfinite(expected.logprobs)
        assert sampled.sum() == 48
        for program in (chat, responses, anthropic_messages):
            (found,) = await agent.generate(ctx, PROMPT, agent=f"{__name__}.{program.__name__}")
            assert found.images == expected.images, program.__name__
            for field in ("token_ids", "loss_mask", "logprobs"):
                np.testing.assert_array_equal(getattr(found, field), getattr(expected, field), program.__name__)
        again = await client.score(expected.token_ids.tolist(), images=expected.images)
        assert np.abs(again.logprobs - expected.logprobs[1:])[sampled[1:]].max() <= 1e-4
        blind = await client.score(expected.token_ids.tolist())
        assert np.abs(blind.logprobs - expected.logprobs[1:])[sampled[1:]].max() > 0.1
        judge = FrozenEngine("judge", client.url, deadline_s=60, retries=0, api_key=client.headers["Authorization"][7:])
        messages = [{"role": "user", "content": content(1, "Look.")}]
        said = {await judge.chat(messages, temperature=0, max_tokens=8) for _ in range(2)}
        messages = [{"role": "user", "content": content(2, "Look.")}]
        assert len(said) == 1 and await judge.chat(messages, temperature=0, max_tokens=8) not in said
        # A model can sample the tokens that announce an image: they are text to the engine, which goes on serving.
        stray = ctx.tokenizer(STRAY).input_ids
        for extra in (stray, stray[::-1]):
            shown = [*expected.token_ids.tolist(), *extra]
            longer = await ctx.engine.generate(shown, {"max_new_tokens": 1}, images=expected.images)
            assert len(longer.token_ids) == 1
            scores = await client.score(shown, images=expected.images)
            np.testing.assert_allclose(scores.logprobs[: len(again.logprobs)], again.logprobs, atol=1e-4)
        assert (await hook(ctx)).token_ids.tolist() == expected.token_ids.tolist()
