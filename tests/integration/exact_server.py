"""Completions of a real server in exact mode: alone, in batches, behind a cached prefix, in chunks, after a pause."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from slimx.engines.server.engine import Engine
from slimx.engines.server.keys import bearer
from slimx.engines.server.spec import EngineSpec
from slimx.extras.exact.mode import Exact
from slimx.layout.ranks import EngineSizes
from slimx.models.families import read_model
from slimx.numerics.mode import NumericsMode
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from tests.integration.conftest import START_S, Weights, perturbed, publish

Completions = list[dict[str, Any]]
Brought = Callable[[Engine, Path], Awaitable[Weights | list[Weights]]]
"""What is published to an engine of a directory's weights: whole tensors, or those of each rank."""


def server(model: Path, dtype: str, leaves: int, sizes: EngineSizes, log: Path, *, threads: int = 1) -> Engine:
    """Its prompts are computed in chunks of 64 tokens, its radix cache is on."""
    spec = EngineSpec(
        "exact",
        str(model),
        dtype,
        "cpu",
        max_total_tokens=8192,
        threads=threads,
        sizes=sizes,
        numerics=NumericsMode() if leaves is None else Exact(leaves),
        routed_experts=read_model(model).experts > 0,
        sglang={"chunked_prefill_size": 64},
    )
    return Engine(spec, log)


def changed(model: Path, out: Path) -> Path:
    """A copy of `model` with other weights."""
    shutil.copytree(model, out)
    save_file(perturbed(load_file(model / "model.safetensors"), 7), out / "model.safetensors", {"format": "pt"})
    return out


async def before_and_after(engine: Engine, first: Path, second: Path, brought: Brought) -> dict[str, Completions]:
    """Completions under the weights of `first`, and of `second` after they are published; by directory."""
    found = {}
    try:
        await engine.start(START_S)
        for version, model in enumerate((first, second), 1):
            await publish(engine, await brought(engine, model), version)
            found[str(model)] = await completions(engine, model)
    finally:
        await engine.stop()
    return found


async def whole(engine: Engine, model: Path) -> dict[str, torch.Tensor]:
    """What a publication brings of a directory under its Hugging Face names."""
    weights, held = load_file(model / "model.safetensors"), (await engine.inventory())[0]
    return {name: _published(weights[name], form, engine.spec.dtype) for name, form in held.items()}


def _published(weight: torch.Tensor, form: str, dtype: str) -> torch.Tensor:
    """As a trainer of `dtype` has it, which keeps the routers' biases only in fp32, in the engine's own dtype (of
    "dtype:shape")."""
    rounded = weight if weight.dim() == 1 and form.startswith("float32") else weight.to(getattr(torch, dtype))
    return rounded.to(getattr(torch, form.partition(":")[0]))


async def completions(engine: Engine, model: Path) -> Completions:
    random, out = np.random.default_rng(5), []

    async def sample(client: GenerationClient, prompt: list[int], temperature: float, cached: int = 0) -> None:
        sampling = {"temperature": temperature, "max_new_tokens": 6, "ignore_eos": True}
        done = await client.generate(GenerationRequest(prompt, sampling, seed=len(out)))
        assert done.cached_tokens >= cached
        one = {"tokens": done.token_ids.tolist(), "logprobs": done.logprobs.tolist()}
        out.append({"prompt": prompt, "temperature": temperature, **one})

    def prompt(length: int) -> list[int]:
        return random.integers(4, 100, length).tolist()

    async with GenerationClient(
        engine.spec.url, ModelShape.of(read_model(model)), api_key=engine.spec.keys.api_key
    ) as client:
        shared = prompt(20)
        await sample(client, shared, 1.0)  # alone
        await sample(client, [*shared, *prompt(3)], 0.7, cached=20)  # behind the prefix that the first one left
        # Sixteen together: short ones, cached prefixes, and prompts of several chunks among running decodes.
        batch = [prompt(n) for n in range(2, 12)] + [[*shared, *prompt(n)] for n in (2, 5, 9, 13)]
        batch += [prompt(150), prompt(90)]
        await asyncio.gather(*(sample(client, p, (1.0, 0.7)[i % 2]) for i, p in enumerate(batch)))
        return out + await retracted(engine, client, [prompt(6) for _ in range(3)])


async def retracted(engine: Engine, client: GenerationClient, prompts: list[list[int]]) -> Completions:
    """Of requests that a pause takes out of the batch; their KV is computed again. Longer ones until one was."""
    longest, end = 24, time.monotonic() + START_S
    while time.monotonic() < end:
        async with aiohttp.ClientSession(engine.spec.url, headers=bearer(engine.spec.keys.api_key)) as session:
            asked = [asyncio.ensure_future(ask(session, each, number, longest)) for number, each in enumerate(prompts)]
            sampling = {"temperature": 1.0, "max_new_tokens": longest, "ignore_eos": True}
            async with client.stream(GenerationRequest(prompts[0], sampling, seed=99)) as stream:
                await anext(aiter(stream))  # the others came before it, and run as well
                await engine.pause("retract")
                await engine.resume()
            found = await asyncio.gather(*asked)
        if any(times for _, times in found):
            return [one for one, _ in found]
        longest *= 2
    raise AssertionError("no pause came while a request ran")


async def ask(session: aiohttp.ClientSession, prompt: list[int], seed: int, tokens: int) -> tuple[dict[str, Any], int]:
    """A completion, and how often it was retracted."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with session.post("/generate", json=body) as answer:
        meta = (await answer.json())["meta_info"]
    logprobs, ids = zip(*((logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]), strict=True)
    one = {"prompt": prompt, "temperature": 1.0, "tokens": list(ids), "logprobs": list(logprobs)}
    return one, meta["num_retractions"]


def run(engine: Engine, first: Path, second: Path, brought: Brought = whole) -> dict[str, Completions]:
    return asyncio.run(before_and_after(engine, first, second, brought))
