"""An agent written against OpenAI's API, as it might be in any framework, trained by pointing its base URL at slimx:

    slimx train configs/moe/quickstart.yaml run.dir=runs/agent rollout.generate=agent \
        rollout.options.agent=examples.openai_agent.solve reward.function=examples.openai_agent.reward

The same agent as a program of its own, started once per rollout:

    ... rollout.options.command='[python, examples/openai_agent.py]' reward.function=examples.openai_agent.reward

It asks, and asks again if the answer is no number. slimx keeps the tokens that were sampled for it: nothing here knows
of training.
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
    """One for all rollouts of the run: to make one takes 19 ms, in which its event loop stands still."""
    return AsyncOpenAI(base_url="http://set.by.rollout", api_key="none")


async def solve(base_url: str, prompt: Any, *, tries: int = 2) -> str:
    """The number that the model says, or whatever it said last. `prompt` has messages."""
    client, messages = shared_client().with_options(base_url=base_url), list(prompt.messages)
    for _ in range(tries):
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
        text = (answer.message.content or "").strip()
        # An answer that was cut off has no end to put a turn after.
        if text.isdigit() or answer.finish_reason == "length":
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Only the number."}]
    return text


async def reward(ctx: Any, trajectory: Any) -> float:
    """1 if what the agent returned is the prompt's answer."""
    return float(trajectory.metadata["result"] == ctx.prompt.answer)


if __name__ == "__main__":
    told = SimpleNamespace(**json.loads(sys.stdin.readline()))
    print(asyncio.run(solve(os.environ["OPENAI_BASE_URL"], told)))
