"""The engine without slimx: plain concurrent HTTP requests to an SGLang server."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from loop_hooks import FIXED_LENGTH

from slimx.data.records import Group
from slimx.rollout.hooks import seed_of

Request = dict[str, Any]


def requests_of(groups: list[Group]) -> list[Request]:
    """Returns the body of one /generate request per rollout of `groups`, the same as slimx sent, seeds included."""
    return [
        {
            "input_ids": trajectory.token_ids[: trajectory.spans[0].stop].tolist(),
            "sampling_params": {
                **{key: value for key, value in trajectory.sampling.items() if key != "seed"},
                **FIXED_LENGTH,
                "sampling_seed": seed_of(trajectory.sampling["seed"], 0),
            },
            "return_logprob": True,
            "return_routed_experts": True,
        }
        for group in groups
        for trajectory in group.trajectories
    ]


async def generate(session: aiohttp.ClientSession, url: str, requests: list[Request]) -> list[dict[str, Any]]:
    """Posts all requests at once to the server at `url`; returns the parsed responses, in order."""

    async def post(body: Request) -> dict[str, Any]:
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            return await response.json()

    return await asyncio.gather(*(post(body) for body in requests))


def sampled(answers: list[dict[str, Any]]) -> int:
    """Returns the number of sampled tokens in `answers`. Raises if one lacks log-probs or routed experts."""
    assert all(answer["meta_info"]["routed_experts"] for answer in answers)
    return sum(len(answer["meta_info"]["output_token_logprobs"]) for answer in answers)
