"""An OpenEnv environment, in the environment that has the package: python openenv_server.py PORT"""

from __future__ import annotations

import os
import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str
    tries: int


class Guessing(Environment):
    """A number from 0 to 9 that the seed decides; the guess 13 raises, and 99 ends the server."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: object) -> Hint:
        self.number, self.tries = random.Random(seed).randrange(10), 0
        return Hint(hint=f"From {more.get('least', 0)} to 9.", tries=0)

    def step(self, action: Guess, timeout_s: float | None = None, **more: object) -> Hint:
        if action.guess == 99:
            os._exit(1)
        if action.guess == 13:
            raise ValueError("not this one")
        self.tries += 1
        right = action.guess == self.number
        hint = "Right." if right else "More." if self.number > action.guess else "Less."
        return Hint(hint=hint, tries=self.tries, reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=3)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
