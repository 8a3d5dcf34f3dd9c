"""The interface of a multi-turn environment, which starts with a prompt and responds to each turn of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slimx.data.records import Prompt
from slimx.json_types import Json

ENVIRONMENTS = "slimx.environments"
"""Entry-point group that registers environments under short names for `rollout.options.environment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Start of an episode, which `Environment.reset` returns if the environment distinguishes states."""

    text: str = ""
    """User turn that follows the prompt; "" for none."""
    images: Sequence[object] = ()
    """Images before the text, as in `Step`."""
    state_key: str | None = None
    """Key that identifies the state in which the model's first turn begins: equal states have equal keys in all
    rollouts of a prompt. None if the environment does not distinguish states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's response to one turn of the model."""

    text: str = ""
    """Next turn of the conversation, which the model reads; unused if `done`."""
    images: Sequence[object] = ()
    """Images before the text, in the forms of `RolloutContext.turn_with_images`."""
    role: str = "user"
    """Role of `text` in the chat template: "user" or "tool"."""
    reward: float = 0.0
    """Reward of the model's turn to which this step responds."""
    done: bool = False
    tool_calls: int = 0
    """Number of tool calls in the model's turn, for the metric `hook/tool_calls`."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are summed over the rollout. Each is logged as the metric `hook/NAME/mean`, averaged over the
    rollouts that logged it. Every step should therefore set every name, to 0 if there is nothing to count."""
    state_key: str | None = None
    """Key that identifies the state after the turn: equal states have equal keys in all rollouts of a prompt. None if
    the environment does not distinguish states. GiGPO (`algorithm.advantages: gigpo`) compares turns that began in the
    same state."""
    info: Json = field(default_factory=dict)
    """Information about the step, as plain JSON values; the last step's information is stored in the trajectory's
    metadata."""


class Environment(Protocol):
    """Interface of an environment for one rollout. Its methods are awaited one at a time; blocking work belongs in
    `asyncio.to_thread`."""

    async def reset(self, prompt: Prompt, seed: int) -> str | Begin:
        """Starts the episode, and returns the user turn that follows the prompt ("" for none), or a `Begin`.

        `seed`: random seed for the rollout, which does not change when a run is resumed.
        """

    async def step(self, text: str) -> Step:
        """Returns the environment's response to `text`, the model's turn."""

    async def close(self) -> None:
        """Ends the episode. Called exactly once, even after an error or an expired deadline."""
