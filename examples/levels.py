"""Curriculum that adapts to the policy: when it solves the prompts of one level, prompts of the next level follow.

    slimx train FILE rollout.source=examples.levels.make_source

A prompt's `metadata.level` is an integer. The level changes with the results in a window of the latest groups: if most
rollouts were correct, the next level starts; if nearly all were wrong, the previous one. Groups that a filter dropped
count, too, because a filter drops groups whose rollouts are all correct.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from slimx.data.prompts.read import Outcome, PromptSource
from slimx.data.records import Prompt

WINDOW = 16
"""Number of the latest groups of the current level whose results decide whether the level changes."""
UP, DOWN = 0.8, 0.2
"""Fractions of correct rollouts: at `UP` or above the next level starts, at `DOWN` or below the previous level."""


def make_source(prompts: list[Prompt], seed: int) -> Levels:
    """Returns the source of prompts; `rollout.source` names this function."""
    return Levels(prompts, seed)


class Levels:
    """Source that yields prompts of one level at a time. Each level has its own shuffled epochs."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        by_level: dict[int, list[Prompt]] = defaultdict(list)
        for prompt in prompts:
            by_level[int(prompt.metadata["level"])].append(prompt)
        self._levels = sorted(by_level)
        self._sources = {level: PromptSource(by_level[level], seed) for level in self._levels}
        self._level_of = {prompt.id: int(prompt.metadata["level"]) for prompt in prompts}
        self._present = 0
        self._shares: deque[float] = deque(maxlen=WINDOW)

    @property
    def level(self) -> int:
        """Level from which the next prompt is taken."""
        return self._levels[self._present]

    def next(self) -> Prompt:
        """Returns the next prompt of the current level."""
        return self._sources[self.level].next()

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Adds outcomes of groups to the window, and changes the level if the window requires it."""
        for outcome in outcomes:
            # Groups of another level started before the level changed; groups without rewards failed.
            if outcome.rewards and self._level_of[outcome.prompt] == self.level:
                self._shares.append(sum(reward > 0 for reward in outcome.rewards) / len(outcome.rewards))
                if len(self._shares) == WINDOW:
                    self._change(sum(self._shares) / WINDOW)

    def _change(self, share: float) -> None:
        present = self._present + (share >= UP) - (share <= DOWN)
        if 0 <= present < len(self._levels) and present != self._present:
            self._present = present
            self._shares.clear()

    def state(self) -> dict[str, Any]:
        """Returns level, window, and the position in each level, for checkpoints."""
        sources = {str(level): source.state() for level, source in self._sources.items()}
        return {"present": self._present, "shares": list(self._shares), "sources": sources}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues at the position `state` of a saved run."""
        self._present, self._shares = state["present"], deque(state["shares"], maxlen=WINDOW)
        for level, source in self._sources.items():
            source.restore(state["sources"][str(level)])
