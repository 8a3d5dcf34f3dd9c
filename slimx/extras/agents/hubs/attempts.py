"""The account of a step environment's rollout: turns that asked for no action, and when there were too many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimx.environments.base import Step
from slimx.errors import SlimxError

NO_ACTION = "That was no action."


@dataclass(slots=True)
class Attempts:
    """Steps and refused turns of one rollout."""

    invalid_reward: float
    max_invalid: int
    steps: int = 0
    invalid: int = 0
    in_a_row: int = 0
    gained: float = 0.0
    """Sum of the environment's rewards."""

    @classmethod
    def checked(cls, key: str, invalid_reward: float, max_invalid: int) -> Attempts:
        """Raises SlimxError for a bound that is no whole number above 0, naming `key`."""
        if isinstance(max_invalid, bool) or not isinstance(max_invalid, int) or max_invalid < 1:
            raise SlimxError(
                f"{key}.max_invalid is {max_invalid!r}; give a whole number of turns, at least 1",
                code="environment.max_invalid",
                about=f"{key}.max_invalid",
            )
        return cls(float(invalid_reward), max_invalid)

    def refused(self, shown: str, state: str, why: str = "") -> Step:
        """The answer to a turn without an action: it is told so, and `shown` the state again."""
        self.invalid += 1
        self.in_a_row += 1
        text = "\n".join(filter(None, [NO_ACTION, why, shown]))
        return self._step(text, self.invalid_reward, state, done=self.in_a_row >= self.max_invalid, invalid=1)

    def carried_out(self, shown: str, reward: float, state: str, *, done: bool) -> Step:
        """The answer to a turn whose action was carried out."""
        self.in_a_row = 0
        self.steps += 1
        self.gained += reward
        return self._step(shown, reward, state, done=done, invalid=0)

    def _step(self, text: str, reward: float, state: str, *, done: bool, invalid: int) -> Step:
        info: dict[str, Any] = {"steps": self.steps, "invalid": self.invalid, "return": self.gained, "state": state}
        counts = {"invalid_actions": invalid}
        return Step(text=text, reward=reward, done=done, info=info, counts=counts, state_key=state)
