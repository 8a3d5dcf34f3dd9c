"""An environment for tests, importable by its dotted path."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

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


def block() -> None:
    """Keeps the thread as a computation without end does, at no cost."""
    while True:
        time.sleep(600)


class Misbehaving:
    """Does what the model says and keeps its event loop: for processes of their own."""

    def __init__(self, *, busy_s: float = 0.0):
        self.busy_s, self.turns = busy_s, 0

    async def reset(self, prompt: Prompt, seed: int) -> str:
        self.prompt, self.seed = prompt.id, seed
        return f"{prompt.id} {os.getpid()}"

    async def step(self, text: str) -> Step:
        self.turns += 1
        if text == "compute for ever":
            block()
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "raise":
            raise ValueError("no such move")
        if text == "start another":
            child = subprocess.Popen(["sleep", "300"])
            Path(self.prompt).write_text(str(child.pid))
            block()
        if text == "start a daemon":
            subprocess.run(["setsid", "-f", "sh", "-c", f"echo $$ > {self.prompt}; exec sleep 300"], check=True)
        time.sleep(self.busy_s)
        info = {"prompt": self.prompt, "turns": self.turns, "pid": os.getpid()}
        return Step(text=text, done=text == "end", info=info if text != "lambda" else {"bad": lambda: 0})

    async def close(self) -> None:
        pass
