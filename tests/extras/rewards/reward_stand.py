"""Shared by the tests of rewards: a judged response, and reward hooks that log, or break as hooks break."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.records import Prompt, Span, Trajectory
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import RewardContext


def trajectory(sampled: int = 1) -> Trajectory:
    """A prompt of one token and `sampled` tokens after it."""
    length = 1 + sampled
    return Trajectory(
        id="t",
        rollout_id="r",
        group_id="g",
        index=0,
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        loss_mask=np.array([0] + [1] * sampled, np.uint8),
        logprobs=np.array([np.nan] + [-1.0] * sampled, np.float32),
        spans=[Span(start=0, stop=1, source="prompt"), Span(start=1, stop=length, source="sampled", version=0)],
    )


def context(text: str = "", answer: str | None = None, **metadata: Any) -> RewardContext:
    prompt = Prompt(id="p7", messages=[{"role": "user", "content": "Why?"}], answer=answer, metadata=metadata)
    return RewardContext(prompt, None, text, False)


def judged(
    hook: Callable[..., Awaitable[Any]], text: str, answer: str | None = None, *, sampled: int = 1, **options: Any
) -> Any:
    """The reward that `hook` gives to a response; `options` are the hook's own."""
    return asyncio.run(hook(context(text, answer), trajectory(sampled), **options))


async def misbehaving(ctx: RewardContext, _: Trajectory, *, worth: float = 1.0) -> Any:
    """Does what the text says."""
    match ctx.text:
        case "compute for ever":
            while True:
                time.sleep(0.01)  # without burning the core that the other tests need
        case "sleep a little":
            time.sleep(0.3)
        case "crash":
            os._exit(77)
        case "raise":
            raise ValueError("no")
        case "nothing":
            return None
        case "process":
            return float(os.getpid())
    return worth


def hooks_of(**reward: Any) -> Any:
    sections = {"run": {"dir": "d"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}
    return load_hooks(Config.model_validate({**sections, "reward": reward}))


async def logs(ctx: RewardContext, _: Trajectory) -> float:
    ctx.log("seen", 7)
    return 0.5
