"""An environment for tests, importable by its dotted path."""

from __future__ import annotations

import asyncio

from slimx.data.records import Prompt
from slimx.environments.base import Step


class Counting:
    """Wants every answer one higher, gives 0.5 for each, and is done after `turns`."""

    closed = 0

    def __init__(self, *, turns: int = 2, hangs: bool = False, begins: str = ""):
        self.turns, self.hangs, self.begins, self.seen = turns, hangs, begins, 0

    async def reset(self, prompt: Prompt, seed: int) -> str:
        return self.begins

    async def step(self, text: str) -> Step:
        if self.hangs:
            await asyncio.sleep(60)
        self.seen += 1
        return Step(text=f"{text}+1", reward=0.5, done=self.seen == self.turns, info={"seen": self.seen}, tool_calls=3)

    async def close(self) -> None:
        Counting.closed += 1
