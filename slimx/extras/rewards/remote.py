"""The reward that a server of yours computes: one HTTP request per trajectory."""

from __future__ import annotations

from typing import Any

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.http import post
from slimx.rewards.context import Context


async def reward(
    ctx: Context, trajectory: Trajectory, *, url: str, timeout: float = 30.0, retries: int = 3
) -> float | dict[str, float]:
    """The answer of `url` to a POST of `{"id", "prompt", "text", "final_answer", "answer", "metadata"}`: a number,
    `{"reward": number}`, or an object of numbers whose sum is the reward. `prompt`: the messages, or the token ids.

    `timeout`: seconds of one request. Raises SlimxError for another answer, or none."""
    prompt = ctx.prompt
    body: dict[str, Any] = {
        "id": trajectory.id,
        "prompt": prompt.messages if prompt.messages is not None else prompt.token_ids,
        "text": ctx.text,
        "final_answer": ctx.final_answer,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
    }
    said = await post(url, body, timeout_s=timeout, retries=retries)
    values = said.values() if isinstance(said, dict) else (said,)
    if not values or any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise SlimxError(
            f"{url} answered {str(said)[:200]}; a reward is a number or an object of numbers",
            code="reward.verdict",
            about=url,
        )
    return said["reward"] if isinstance(said, dict) and said.keys() == {"reward"} else said
