"""Hooks with images in later turns, which the integration tests name in their configurations."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import openai
from PIL import Image

from slimx.data.records import Prompt, Trajectory
from slimx.environments.base import Begin, Step
from slimx.extras.agents import agent, multi_turn
from slimx.rollout.hooks import RolloutContext

STRAY = "<|image_pad|> <|vision_start|><|video_pad|>"
"""Text with tokens that announce an image where there is none, as a model can sample them."""
LOOK = "What is it?"


def pixels(seed: int, wide: int = 64, high: int = 64) -> np.ndarray:
    """Returns random colors, uint8 [high, wide, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)


def png(seed: int) -> bytes:
    """Returns the PNG file of `pixels`."""
    file = io.BytesIO()
    Image.fromarray(pixels(seed)).save(file, "PNG")
    return file.getvalue()


def uri(seed: int) -> str:
    """Returns the data URI of `png`."""
    return f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}"


class Painted:
    """Environment that first shows text with placeholders, and answers each turn with an image."""

    def __init__(self) -> None:
        self._turn = 0

    async def reset(self, prompt: Prompt, seed: int) -> Begin:
        return Begin(text=STRAY)

    async def step(self, text: str) -> Step:
        self._turn += 1
        forms: Sequence[object] = (pixels(1), Image.fromarray(pixels(2, 96)), png(3), uri(4))
        return Step(text=LOOK, images=[forms[self._turn % 4], forms[(self._turn + 1) % 4]], role="tool")

    async def close(self) -> None: ...


def content(seed: int, text: str) -> list[dict[str, Any]]:
    """Returns the content of a message of OpenAI's API with an image before `text`."""
    return [{"type": "image_url", "image_url": {"url": uri(seed)}}, {"type": "text", "text": text}]


async def solve(base_url: str, prompt: Prompt) -> None:
    """Shows the model an image in each of two turns."""
    messages: list[Any] = [{"role": "user", "content": content(1, "Look.")}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        for seed in (2, 3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": content(seed, LOOK)}]
        await client.chat.completions.create(model="m", messages=messages)


async def mixed(ctx: RolloutContext, prompt: Prompt) -> Trajectory | list[Trajectory]:
    """Runs the agent in every other rollout, and an environment in the others."""
    if ctx.index % 2:
        return await agent.generate(ctx, prompt, agent=f"{__name__}.solve")
    return await multi_turn.generate(ctx, prompt, environment=f"{__name__}.Painted", max_turns=3)
