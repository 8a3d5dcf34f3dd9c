"""Hooks that are wrong in one way each, and some that are right; importable by their dotted paths."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.request
from typing import Any

from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext


async def good(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids))
    return draft.finish(metadata={"fine": [1, "x"]})


async def calling(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Calls a tool for each sum that the model writes, and inserts the result as one token."""
    draft = ctx.draft(prompt)
    for turn in range(4):
        completion = await ctx.engine.generate(draft.token_ids, turn=turn)
        draft.add_sampled(completion)
        if "+" not in ctx.tokenizer.decode(completion.token_ids):
            break
        draft.add_inserted([5])
    return draft.finish()


async def streaming(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    async with ctx.engine.stream(draft.token_ids) as stream:
        async for _ in stream:
            pass
    draft.add_sampled(stream.completion)
    return draft.finish()


async def untrained(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids), train=False)
    return draft.finish()


async def without_logprobs(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    trajectory = await good(ctx, prompt)
    trajectory.logprobs[:] = float("nan")
    return trajectory


async def long_prompt(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft([*([5] * 70), *ctx.draft(prompt).token_ids])
    draft.add_sampled(await ctx.engine.generate(draft.token_ids))
    return draft.finish()


async def endless_trajectory(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    for turn in range(3):
        draft.add_inserted([5] * 4000)
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=turn))
    return draft.finish()


async def unsaveable(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    return dataclasses.replace(await good(ctx, prompt), metadata={"agent": object()})


async def raising(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    raise KeyError("tool")


async def strange(ctx: RolloutContext, prompt: Prompt) -> Any:
    return "an answer"


async def one_seed(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    for _ in range(2):
        draft.add_sampled(await ctx.engine.generate(draft.token_ids))
        draft.add_inserted([5])
    return draft.finish()


async def holding(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    time.sleep(0.8)
    return await good(ctx, prompt)


async def stuck(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    time.sleep(30)
    return await good(ctx, prompt)


async def unknown_parameter(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, {"min_p": 0.1}))
    return draft.finish()


def blocking(ctx: RolloutContext, prompt: Prompt) -> Trajectory: ...


async def right(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    return {"right": float(ctx.text.strip() == ctx.prompt.answer), "form": 0.5}


async def constant(ctx: RewardContext, trajectory: Trajectory) -> float:
    return 0.25


async def none(ctx: RewardContext, trajectory: Trajectory) -> Any:
    return None


async def asks_judge(ctx: RewardContext, trajectory: Trajectory) -> float:
    verdict = await ctx.engines["judge"].chat([{"role": "user", "content": ctx.text}])
    return float(verdict.removeprefix("Points: "))


async def asks_by_hand(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Blocks on the engines' address: answered all the same."""
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{ctx.address}/generate", body), timeout=300).read()
    return await good(ctx, prompt)


def drop(group: Group) -> str:
    return "no signal"


def strange_keep(group: Group) -> Any:
    return {"keep": True}


def raising_keep(group: Group) -> bool:
    raise ValueError("no rewards")


def user_loss(inputs: Any) -> Any:
    return inputs.logprobs
