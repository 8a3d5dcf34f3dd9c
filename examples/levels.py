"""A curriculum that follows the policy: prompts of the next level come when those of this one are solved.

    slimx train FILE rollout.source=examples.levels.make_source

Prompts say their level in `metadata.level`, a whole number. A window of the latest groups decides: where most rollouts
were right the next level begins, where nearly all were wrong the one before. Groups that a filter dropped count too:
those that are all right are what it drops.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from slimx.data.prompts.read import Outcome, PromptSource
from slimx.data.records import Prompt

WINDOW = 16
"""Groups of the present level that are looked at."""
UP, DOWN = 0.8, 0.2
"""Shares of right rollouts in the window at which the level changes."""


def make_source(prompts: list[Prompt], seed: int) -> Levels:
    """The source that `rollout.source` names."""
    return Levels(prompts, seed)


class Levels:
    """Prompts of one level at a time, each level in shuffled epochs of its own."""

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
        """The level that prompts are taken from."""
        return self._levels[self._present]

    def next(self) -> Prompt:
        """The next prompt of the present level."""
        return self._sources[self.level].next()

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Change the level if the window of groups says so."""
        for outcome in outcomes:
            # A group of another level was begun before the level changed; one without rewards broke.
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
        """The level, the window, and the position in each level."""
        sources = {str(level): source.state() for level, source in self._sources.items()}
        return {"present": self._present, "shares": list(self._shares), "sources": sources}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where the run that had this `state` was."""
        self._present, self._shares = state["present"], deque(state["shares"], maxlen=WINDOW)
        for level, source in self._sources.items():
            source.restore(state["sources"][str(level)])
