"""Plays environments with Gymnasium's interface as text: those of Gymnasium itself, RAGEN, verl-agent and others.

rollout:
  generate: multi_turn
  options:
    environment: gymnasium
    environment_options:
      id: FrozenLake-v1
      make_options: {is_slippery: false, render_mode: ansi}
      text_options: {actions: {left: 0, down: 1, right: 2, up: 3}, ask: "One of left, down, right, up in <answer>."}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slimx.data.records import Prompt
from slimx.dotted import imported
from slimx.environments.base import Begin, Step
from slimx.errors import SlimxError, raised
from slimx.extras.agents.hubs.attempts import StepEnvironment, finite
from slimx.extras.agents.hubs.views import seed_of_prompt

PACKAGE = "gymnasium==1.4.0"
KEY = "rollout.options.environment_options"
WORDS = "slimx.extras.agents.hubs.views.Words"


class Gymnasium(StepEnvironment):
    """One rollout's Gymnasium environment. A view parses actions from the model's turns and renders observations.

    All rollouts of a prompt start in the same state: the environment's seed is the prompt's `metadata.seed`, or else is
    derived from the prompt's id. `metadata.reset` becomes the argument `options` of the environment's `reset`.
    """

    def __init__(
        self,
        *,
        id: str | None = None,
        make: str | None = None,
        make_options: Mapping[str, Any] | None = None,
        text: str = WORDS,
        text_options: Mapping[str, Any] | None = None,
        invalid_reward: float = 0.0,
        max_invalid: int = 3,
    ) -> None:
        """Imports the environment's constructor and the view.

        `id`: argument of `gymnasium.make`, MODULE:ID for an environment that a module registers. `make`: dotted path of
        a function or class that creates the environment, instead of `id`. `make_options`: keyword arguments of
        `gymnasium.make`, or of the function or class `make`. A mapping with the key `make` among them is replaced by an
        object: the class or function that `make` names is called with the mapping's other keys. `text`: dotted path of
        a `slimx.extras.agents.hubs.views.View`. `text_options`: keyword arguments of the view. `invalid_reward`: reward
        of a turn without an action. `max_invalid`: number of consecutive turns without an action after which the
        rollout ends.
        """
        if (id is None) == (make is None):
            raise SlimxError(
                f"{KEY} sets {'neither id nor make' if id is None else 'both id and make'}; set either `id` to "
                "a name for gymnasium.make, or `make` to the dotted path of a function",
                code="gymnasium.which",
                about=KEY,
            )
        super().__init__(KEY, invalid_reward, max_invalid)
        self._name = id or make or ""
        self._maker: Callable[..., Any] = _registered(id) if id is not None else imported(f"{KEY}.make", make or "")
        self._make_options = dict(make_options or {})
        self._text = imported(f"{KEY}.text", text)
        self._text_options = dict(text_options or {})
        self._world: Any = None

    @classmethod
    def check(cls, **options: Any) -> None:
        """Creates, resets and renders an environment, and parses a turn, before the run starts. Raises SlimxError if
        that fails."""
        trial = cls(**options)
        try:
            trial._open(0, None)
            trial._actions("")
        finally:
            trial._close()

    async def reset(self, prompt: Prompt, seed: int) -> Begin:
        """Creates the environment and resets it to the prompt's initial state.

        Raises SlimxError if `metadata.seed` of the prompt is not a non-negative integer.
        """
        self._open(seed_of_prompt(prompt), prompt.metadata.get("reset"))
        return self._beginning()

    async def step(self, text: str) -> Step:
        """Executes the actions of the model's turn `text` until one ends the episode; their rewards are added. Without
        a valid action, nothing changes and a notice is returned."""
        actions = self._actions(text)
        if not actions:
            return self._refused()
        total, steps = 0.0, 0
        for action in actions:
            answer = self._call("step", self._world.step, action)
            if not isinstance(answer, tuple) or len(answer) not in (4, 5):
                raise self._broken("step", "(observation, reward, terminated, truncated, info)", answer)
            observation, reward, *ended, info = answer
            gained = finite(reward)
            if gained is None:
                raise self._broken("step", "a finite reward", reward)
            total += gained
            steps += 1
            if any(map(bool, ended)):
                break
        self._look(observation, info)
        return self._carried_out(total, done=any(map(bool, ended)), steps=steps)

    async def close(self) -> None:
        """Closes the environment, if it was created."""
        self._close()

    def _actions(self, text: str) -> list[Any]:
        """Returns the valid actions in a turn of the model, in their order."""
        several = getattr(self._view, "actions", None)
        if several is None:
            action = self._call("the view's action", self._view.action, text)
            found = [] if action is None else [action]
        else:
            found = list(self._call("the view's actions", several, text))
        space = getattr(self._world, "ACTION_SPACE", None)  # RAGEN's; action_space is then of the class it extends
        if space is None:
            space = getattr(self._world, "action_space", None)
        if space is None:
            return found
        return [action for action in found if self._call("action_space.contains", space.contains, action)]

    def _open(self, seed: int, options: Any) -> None:
        made = {name: self._made(name, value) for name, value in self._make_options.items()}
        self._world = self._call("its constructor", self._maker, **made)
        self._view = self._call("its view", self._text, self._world, **self._text_options)
        keywords = {"seed": seed}
        if options is not None:
            keywords["options"] = options
        begun = self._call("reset", self._world.reset, **keywords)
        if isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], Mapping):
            observation, info = begun
            self._look(observation, info)
        else:
            self._look(begun, {})

    def _made(self, name: str, value: Any) -> Any:
        """Returns the value of a constructor's argument: the object that `value` describes if it is a mapping with the
        key `make`, or else `value`."""
        if not isinstance(value, Mapping) or "make" not in value:
            return value
        options = {key: option for key, option in value.items() if key != "make"}
        maker = imported(f"{KEY}.make_options.{name}.make", str(value["make"]))
        return self._call(f"make_options.{name}", maker, **options)

    def _close(self) -> None:
        close = getattr(self._world, "close", None)
        self._world = None
        if close is not None:
            self._call("close", close)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except SlimxError:
            raise
        except Exception as error:
            raise SlimxError(
                f"the environment {self._name} failed in {name} ({raised(error)}); correct the code of the "
                f"environment, or the arguments in {KEY}",
                code="gymnasium.raised",
                about=self._name,
            ) from error

    def _broken(self, name: str, expected: str, value: object) -> SlimxError:
        return SlimxError(
            f"the environment {self._name} returned {str(value)[:200]!r} from {name}; make {name} return {expected}",
            code="gymnasium.answer",
            about=self._name,
        )


def _registered(id: str) -> Callable[..., Any]:
    try:
        import gymnasium
    except ImportError as error:
        raise SlimxError(
            f"{KEY}.id: {id} needs the package gymnasium, which cannot be imported ({raised(error)}); run "
            f"`pip install {PACKAGE}`",
            code="gymnasium.package",
            about=f"{KEY}.id",
        ) from error
    return lambda **options: gymnasium.make(id, **options)
