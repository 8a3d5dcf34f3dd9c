"""Shared parts of step environments of other projects: a view shows observations and reads actions, and turns that
ask for no action are counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slimx.environments.base import Begin, Step
from slimx.errors import SlimxError
from slimx.extras.agents.hubs.views import state_digest

NO_ACTION = "That was no action."


class StepEnvironment:
    """The account of one rollout, and the state that the model reads of."""

    def __init__(self, key: str, invalid_reward: float, max_invalid: int) -> None:
        """`invalid_reward`: for a turn without an action; `max_invalid`: such turns in a row, after which the rollout
        ends. Raises SlimxError for a bound that is no whole number above 0, naming `key`."""
        if isinstance(max_invalid, bool) or not isinstance(max_invalid, int) or max_invalid < 1:
            raise SlimxError(
                f"{key}.max_invalid is {max_invalid!r}; give a whole number of turns, at least 1",
                code="environment.max_invalid",
                about=f"{key}.max_invalid",
            )
        self._invalid_reward, self._max_invalid = float(invalid_reward), max_invalid
        self._steps = self._invalid = self._in_a_row = 0
        self._gained = 0.0
        self._view: Any = None
        self._state = self._shown = ""

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function of the view."""
        return function(*arguments)

    def _look(self, observation: Any, info: Any) -> None:
        self._shown = str(self._call("the view's show", self._view.show, observation, info))
        state = getattr(self._view, "state", None)
        if state is None:
            self._state = state_digest(observation)
        else:
            self._state = str(self._call("the view's state", state, observation, info))

    def _begun(self) -> Begin:
        return Begin(text=self._shown, state_key=self._state)

    def _refused(self, why: str = "") -> Step:
        """The answer to a turn without an action: it says so, `why`, and the state again."""
        self._invalid += 1
        self._in_a_row += 1
        text = "\n".join(filter(None, [NO_ACTION, why, self._shown]))
        return self._step(text, self._invalid_reward, done=self._in_a_row >= self._max_invalid, invalid=1)

    def _carried_out(self, reward: float, *, done: bool) -> Step:
        """The answer to a turn whose action was carried out."""
        self._in_a_row = 0
        self._steps += 1
        self._gained += reward
        return self._step(self._shown, reward, done=done, invalid=0)

    def _step(self, text: str, reward: float, *, done: bool, invalid: int) -> Step:
        info = {"steps": self._steps, "invalid": self._invalid, "return": self._gained, "state": self._state}
        counts = {"invalid_actions": invalid}
        return Step(text=text, reward=reward, done=done, info=info, counts=counts, state_key=self._state)


def finite(reward: Any) -> float | None:
    """A reward as a number; None for what is none, or not finite."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
