"""Agent that uses OpenAI's API, as agents in many frameworks do. It is trained by pointing its base URL at slimx:

    slimx train configs/moe/quickstart.yaml run.dir=runs/agent rollout.generate=agent \
        rollout.options.agent=examples.openai_agent.solve reward.function=examples.openai_agent.reward

The same agent as a separate program, which is started once per rollout:

    ... rollout.options.command='[python, examples/openai_agent.py]' reward.function=examples.openai_agent.reward

The agent sends the prompt, and requests another answer if the first is not a number. slimx records the tokens that are
sampled for the agent, so its code contains nothing about training.
"""

import asyncio
import functools
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI


@functools.cache
def shared_client() -> AsyncOpenAI:
    """Returns the client that all rollouts share, because creating one takes 19 ms and blocks the event loop."""
    return AsyncOpenAI(base_url="http://set.by.rollout", api_key="none")


async def solve(base_url: str, prompt: Any, *, tries: int = 2) -> str:
    """Returns the number with which the model answers, or its last answer if none of `tries` answers is a number."""
    client, messages = shared_client().with_options(base_url=base_url), list(prompt.messages)
    for _ in range(tries):
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
        text = (answer.message.content or "").strip()
        # No turn can follow an answer that was cut off.
        if text.isdigit() or answer.finish_reason == "length":
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Only the number."}]
    return text


async def reward(ctx: Any, trajectory: Any) -> float:
    """Returns 1 if the agent's result is the prompt's answer, else 0."""
    return float(trajectory.metadata["result"] == ctx.prompt.answer)


if __name__ == "__main__":
    prompt = SimpleNamespace(**json.loads(sys.stdin.readline()))
    print(asyncio.run(solve(os.environ["OPENAI_BASE_URL"], prompt)))
