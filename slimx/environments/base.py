"""The interface of a multi-turn environment: it begins with a prompt and answers each of the model's turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slimx.data.records import Prompt

ENVIRONMENTS = "slimx.environments"
"""Group of entry points: environments by the names that a configuration has for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The start of an environment whose states are told apart."""

    text: str = ""
    """The text that follows the prompt as a user's turn; "" for none."""
    state_key: str | None = None
    """Key of the state in which the first turn begins; see `Step.state_key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one turn."""

    text: str = ""
    """The next turn, which the model reads; not shown when `done`."""
    role: str = "user"
    """Role of that turn in the chat template: user or tool."""
    reward: float = 0.0
    """For the model's turn before it."""
    done: bool = False
    tool_calls: int = 0
    """Tools that the turn called, for the metric `hook/tool_calls`."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Added up over the rollout: each is a curve `hook/NAME/mean`, over the rollouts that logged it. So a name belongs
    in every step, with 0 where nothing is to be counted."""
    state_key: str | None = None
    """Key of the state that the turn led to: equal for equal states among all rollouts of a prompt. GiGPO compares
    turns that began in the same state (`algorithm.advantages: gigpo`). None where states are not told apart."""
    info: dict[str, Any] = field(default_factory=dict)
    """Kept in the trajectory's metadata; plain JSON values."""


class Environment(Protocol):
    """One per rollout. Methods are awaited one after the other; what blocks belongs in `asyncio.to_thread`."""

    async def reset(self, prompt: Prompt, seed: int) -> str | Begin:
        """Begin; the text that follows the prompt as a user's turn, "" for none, or a `Begin`. `seed` is the rollout's
        own, the same in a resumed run."""
        ...

    async def step(self, text: str) -> Step:
        """Answer the model's turn."""
        ...

    async def close(self) -> None:
        """End, whatever happened before; called once, also after an error or a deadline."""
        ...
