"""The interface of a multi-turn environment, which starts with a prompt and responds to each turn of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from slimx.data.records import Prompt
from slimx.json_types import Json

ENVIRONMENTS = "slimx.environments"
"""Group of entry points: environments by their names in a configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The start of an environment with distinguishable states."""

    text: str = ""
    """User turn after the prompt; "" for none."""
    state_key: str | None = None
    """Key of the state in which the first turn begins; see `Step.state_key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's response to one turn."""

    text: str = ""
    """The next turn, which the model reads; unused if `done`."""
    role: str = "user"
    """Role of that turn in the chat template: user or tool."""
    reward: float = 0.0
    """Reward of the model's previous turn."""
    done: bool = False
    tool_calls: int = 0
    """Number of tool calls in the turn, for the metric `hook/tool_calls`."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Summed over the rollout: each is a metric `hook/NAME/mean`, averaged over the rollouts that logged it. Include a
    name in every step, with 0 if there is nothing to count."""
    state_key: str | None = None
    """Key of the state after the turn, equal for equal states in all rollouts of a prompt. GiGPO compares turns that
    began in the same state (`algorithm.advantages: gigpo`). None if states are not distinguished."""
    info: Json = field(default_factory=dict)
    """Stored in the trajectory's metadata; plain JSON values."""


class Environment(Protocol):
    """The environment of one rollout. Methods are awaited sequentially; blocking work belongs in
    `asyncio.to_thread`."""

    async def reset(self, prompt: Prompt, seed: int) -> str | Begin:
        """Starts the episode. Returns the user turn after the prompt, "" for none, or a `Begin`. `seed` is the
        rollout's, the same in a resumed run."""
        ...

    async def step(self, text: str) -> Step:
        """Returns the response to the model's turn."""
        ...

    async def close(self) -> None:
        """Ends the episode; called once, also after an error or a deadline."""
        ...
