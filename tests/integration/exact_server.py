"""Completions of a real server in exact mode: alone, in batches, behind a cached prefix, in chunks, after a pause."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from slimx.layout.ranks import EngineSizes
from slimx.models.families import read_model
from slimx.ports import free_port
from slimx.rollout.client import GenerationClient, ModelShape
from slimx.rollout.engine import Engine
from slimx.rollout.spec import EngineSpec
from tests.integration.conftest import START_S, perturbed, publish

Completions = list[dict[str, Any]]


def server(model: Path, dtype: str, leaves: int, tensor: int, log: Path) -> Engine:
    """Its prompts are computed in chunks of 64 tokens, its radix cache is on."""
    spec = EngineSpec(
        "exact",
        str(model),
        dtype,
        "cpu",
        free_port(),
        max_total_tokens=8192,
        sizes=EngineSizes(tensor=tensor),
        exact_leaves=leaves,
        routed_experts=read_model(model).experts > 0,
        sglang={"chunked_prefill_size": 64},
    )
    return Engine(spec, log)


def changed(model: Path, out: Path) -> Path:
    """A copy of `model` with other weights."""
    shutil.copytree(model, out)
    save_file(perturbed(load_file(model / "model.safetensors"), 7), out / "model.safetensors", {"format": "pt"})
    return out


async def before_and_after(engine: Engine, first: Path, second: Path, dtype: str) -> dict[str, Completions]:
    """Completions under the weights of `first`, and of `second` after they are published; by directory."""
    engine.start()
    found = {}
    try:
        await engine.wait_ready(START_S)
        for version, model in enumerate((first, second), 1):
            weights = load_file(model / "model.safetensors")
            held = (await engine.inventory())[0]
            await publish(engine, {n: w.to(getattr(torch, dtype)) for n, w in weights.items() if n in held}, version)
            found[str(model)] = await completions(engine, model)
    finally:
        await engine.stop()
    return found


async def completions(engine: Engine, model: Path) -> Completions:
    random, out = np.random.default_rng(5), []

    async def sample(client: GenerationClient, prompt: list[int], temperature: float, tokens: int = 6) -> None:
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        done = await client.generate(prompt, sampling, seed=len(out))
        one = {"tokens": done.token_ids.tolist(), "logprobs": done.logprobs.tolist()}
        out.append({"prompt": prompt, "temperature": temperature, **one})

    def prompt(length: int) -> list[int]:
        return random.integers(4, 100, length).tolist()

    async with GenerationClient(engine.spec.url, ModelShape.of(read_model(model))) as client:
        shared = prompt(20)
        await sample(client, shared, 1.0)  # alone
        await sample(client, [*shared, *prompt(3)], 0.7)  # behind the prefix that the first one left in the cache
        # Sixteen together: short ones, cached prefixes, and prompts of several chunks among running decodes.
        batch = [prompt(n) for n in range(2, 12)] + [[*shared, *prompt(n)] for n in (2, 5, 9, 13)]
        batch += [prompt(150), prompt(90)]
        await asyncio.gather(*(sample(client, p, (1.0, 0.7)[i % 2]) for i, p in enumerate(batch)))
        # Interrupted: what runs is retracted, and its KV computed again.
        running = [asyncio.ensure_future(sample(client, prompt(6), 1.0, 24)) for _ in range(4)]
        await asyncio.sleep(0.3)
        await engine.pause("retract")
        await engine.resume()
        await asyncio.gather(*running)
    return out


def run(engine: Engine, first: Path, second: Path, dtype: str) -> dict[str, Completions]:
    return asyncio.run(before_and_after(engine, first, second, dtype))
