"""Base class of adapters for step environments of other projects.

A view renders observations as text and parses actions from the model's turns. Turns without an action are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slimx.environments.base import Begin, Step
from slimx.errors import SlimxError
from slimx.extras.agents.hubs.views import state_digest

NO_ACTION = "That was no action."
"""Text that the model receives after a turn without an action."""


class StepEnvironment:
    """Base class of one rollout's environment: counts steps and invalid turns, and stores the current state as text."""

    def __init__(self, key: str, invalid_reward: float, max_invalid: int) -> None:
        """Starts the counts at 0.

        `key`: configuration key of the options, for error messages. `invalid_reward`: reward of a turn without an
        action. `max_invalid`: number of consecutive turns without an action after which the rollout ends. Raises
        SlimxError if `max_invalid` is not an integer above 0.
        """
        if isinstance(max_invalid, bool) or not isinstance(max_invalid, int) or max_invalid < 1:
            raise SlimxError(
                f"{key}.max_invalid must be an integer of at least 1, not {max_invalid!r}; set the number of "
                "consecutive invalid answers that end the episode",
                code="environment.max_invalid",
                about=f"{key}.max_invalid",
            )
        self._invalid_reward = float(invalid_reward)
        self._max_invalid = max_invalid
        self._steps = 0
        self._invalid = 0
        self._in_a_row = 0
        self._gained = 0.0
        self._view: Any = None
        self._state = ""
        self._shown = ""
        self._images: list[object] = []

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function` with `arguments`. A subclass overrides this method to convert the function's errors to
        SlimxError. `name`: name of the function in these errors."""
        return function(*arguments)

    def _look(self, observation: object, info: object) -> None:
        """Renders an observation, and stores its text, its images and its state key."""
        self._shown = str(self._call("the view's show", self._view.show, observation, info))
        images = getattr(self._view, "images", None)
        if images is not None:
            self._images = list(self._call("the view's images", images, observation, info))
        state = getattr(self._view, "state", None)
        if state is None:
            self._state = state_digest(observation)
        else:
            self._state = str(self._call("the view's state", state, observation, info))

    def _beginning(self) -> Begin:
        return Begin(text=self._shown, images=self._images, state_key=self._state)

    def _refused(self, reason: str = "") -> Step:
        """Returns the response to a turn without an action: a notice, `reason`, and the text of the unchanged state."""
        self._invalid += 1
        self._in_a_row += 1
        text = "\n".join(filter(None, [NO_ACTION, reason, self._shown]))
        return self._step(text, self._invalid_reward, done=self._in_a_row >= self._max_invalid, invalid=1)

    def _carried_out(self, reward: float, *, done: bool, steps: int = 1) -> Step:
        """Returns the response to a turn whose actions were executed: the text of the new state, with `reward`.
        `steps`: number of actions."""
        self._in_a_row = 0
        self._steps += steps
        self._gained += reward
        return self._step(self._shown, reward, done=done, invalid=0)

    def _step(self, text: str, reward: float, *, done: bool, invalid: int) -> Step:
        info = {"steps": self._steps, "invalid": self._invalid, "return": self._gained, "state": self._state}
        counts = {"invalid_actions": invalid}
        return Step(
            text=text,
            images=self._images,
            reward=reward,
            done=done,
            info=info,
            counts=counts,
            state_key=self._state,
        )


def finite(reward: Any) -> float | None:
    """Returns a reward as a float; None if it is not a finite number."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
