"""Reward from a user's web service, which receives one HTTP request per trajectory."""

from __future__ import annotations

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.http import post
from slimx.json_types import Json
from slimx.rewards.context import Context


async def reward(
    ctx: Context, trajectory: Trajectory, *, url: str, timeout: float = 30.0, retries: int = 3
) -> float | dict[str, float]:
    """Posts `{"id", "prompt", "text", "final_answer", "answer", "metadata"}` to `url` and returns the response: a
    number, `{"reward": number}`, or an object of numbers whose sum is the reward.

    `prompt` in the request is a list of messages or of token ids. `timeout`: seconds per request; `retries`: maximum
    number of retries. Raises SlimxError for any other response, or if the service does not respond."""
    prompt = ctx.prompt
    body: Json = {
        "id": trajectory.id,
        "prompt": prompt.messages if prompt.messages is not None else prompt.token_ids,
        "text": ctx.text,
        "final_answer": ctx.final_answer,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
    }
    response = await post(url, body, timeout_s=timeout, retries=retries)
    values = list(response.values()) if isinstance(response, dict) else [response]
    if not values or any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise SlimxError(
            f"{url} returned {str(response)[:200]}, which is not a reward; change the server to return a number, or a "
            "non-empty JSON object whose values are all numbers",
            code="reward.verdict",
            about=url,
        )
    if isinstance(response, dict) and response.keys() == {"reward"}:
        return response["reward"]
    return response
