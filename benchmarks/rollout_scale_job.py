"""The rollouts of benchmarks/rollout_scale.py: turns of a request to the engine and a wait for a tool, then a reward of
two parts. Once as slimx's hooks, and once by asyncio and aiohttp alone."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext

MARKER = 10
"""Tokens that the chat template adds to a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The shape of every rollout."""

    turns: int = 4
    prompt_tokens: int = 512
    """Tokens of the prompt."""
    answer: int = 64
    """Tokens of an answer."""
    result: int = 128
    """Tokens of a tool's result."""
    wait: float = 1.0
    """Mean wait for a tool in seconds; waits are uniformly distributed between a tenth and nineteen tenths of it."""

    layers: int = 0
    """Layers whose experts the engines return for every token, a multiple of 3; 0: they return none."""

    @property
    def sampled(self) -> int:
        """Sampled tokens of a rollout."""
        return self.turns * self.answer

    @property
    def sent(self) -> int:
        """Tokens that all requests of a rollout send together."""
        return sum(self.prompt_tokens + turn * (self.answer + self.result) for turn in range(self.turns))

    @property
    def length(self) -> int:
        """Tokens of a rollout."""
        return self.prompt_tokens + self.turns * self.answer + (self.turns - 1) * self.result

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`."""
        return asdict(self)


def waits_of(job: Job, seed: int) -> list[float]:
    """Returns the seconds of a rollout's waits, one a turn."""
    draws = random.Random(seed)
    return [job.wait * draws.uniform(0.1, 1.9) for _ in range(job.turns)]


async def generate(ctx: RolloutContext, prompt: Prompt, **options: Any) -> Trajectory:
    """Calls the engine and waits, alternately. `options`: fields of `Job`."""
    job = Job(**options)
    draft = ctx.draft(prompt)
    text = "r" * (job.result - MARKER - 1)
    for turn, seconds in enumerate(waits_of(job, ctx.seed)):
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=turn))
        await asyncio.sleep(seconds)
        if turn + 1 < job.turns:
            draft.add_inserted(ctx.turn(text, after=draft.token_ids, role="tool"))
    return draft.finish()


async def length_reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns a number that varies with the rollout."""
    return (trajectory.index + len(ctx.text)) % 5 / 4


async def even_reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns 1 for every other rollout of a group, else 0."""
    return float(trajectory.index % 2)


async def plain_rollout(
    session: aiohttp.ClientSession,
    places: asyncio.Semaphore,
    url: str,
    job: Job,
    prompt: Sequence[int],
    result: Sequence[int],
    index: int,
    seed: int,
) -> dict[str, Any]:
    """Makes a rollout with asyncio and aiohttp alone. Returns its columns as arrays, and its rewards."""
    ids, logprobs, mask = list(prompt), [0.0] * len(prompt), [0] * len(prompt)
    experts = np.zeros(0, np.uint8)
    headers = {"Content-Type": "application/json"}
    for turn, seconds in enumerate(waits_of(job, seed)):
        sampling = {"max_new_tokens": job.answer, "temperature": 1.0, "sampling_seed": seed + turn}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": False}
        if job.layers:
            body["return_routed_experts"] = True
        async with places, session.post(f"{url}/generate", data=json.dumps(body), headers=headers) as response:
            response.raise_for_status()
            meta = json.loads(await response.read())["meta_info"]
        sampled = meta["output_token_logprobs"]
        if job.layers:
            experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).astype(np.uint8)
        ids += [entry[1] for entry in sampled]
        logprobs += [entry[0] for entry in sampled]
        mask += [1] * len(sampled)
        await asyncio.sleep(seconds)
        if turn + 1 < job.turns:
            ids += result
            logprobs += [0.0] * len(result)
            mask += [0] * len(result)
    return {
        "tokens": np.array(ids, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "mask": np.array(mask, np.uint8),
        "experts": experts,
        "rewards": {"length": (index + job.answer) % 5 / 4, "even": float(index % 2)},
    }
