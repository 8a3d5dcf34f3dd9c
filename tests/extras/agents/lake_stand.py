"""Views and environments of step environments, importable by their dotted paths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

MOVES = ("left", "down", "right", "up")


class Lake:
    """A user's view of FrozenLake: the row and column in words."""

    def __init__(self, environment: Any, *, columns: int = 4):
        self.columns = columns

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:
        return "row {} column {}".format(*divmod(int(observation), self.columns))

    def action(self, text: str) -> Any:
        return MOVES.index(text.strip()) if text.strip() in MOVES else None


class Nameless(Lake):
    """Tells states apart by their column alone."""

    def state(self, observation: Any, info: Mapping[str, Any]) -> str:
        return f"column {int(observation) % self.columns}"


class OldStyle:
    """Text in and text out, with gym's former interface, as RAGEN's environments have it."""

    def __init__(self, *, target: str = "b", reward: Any = 1.0, answer: Any = None, observes: Any = None):
        self.target, self.reward, self.answer, self.observes = target, reward, answer, observes
        self.closed = False

    def reset(self, seed: int | None = None) -> Any:
        self.seed = seed
        return self.observes or f"seed {seed}"

    def step(self, action: str) -> Any:
        if action == "raise":
            raise KeyError("no such move")
        if action == "hang":
            time.sleep(600)
        done = action == self.target
        return self.answer or (f"you said {action}", self.reward if done else 0.0, done, {"success": done})
