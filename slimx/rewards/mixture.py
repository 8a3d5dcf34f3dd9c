"""Several rewards as one: the weighted sum of the parts that fit a prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.rewards.context import Context

Hook = Callable[[Any, Trajectory], Awaitable[float | dict[str, float]]]


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One reward of a mixture."""

    name: str
    hook: Hook
    weight: float
    where: Mapping[str, Any]
    """Metadata that a prompt must have."""

    def fits(self, prompt: Prompt) -> bool:
        return all(key in prompt.metadata and prompt.metadata[key] == value for key, value in self.where.items())


@dataclass(frozen=True, slots=True)
class Mixture:
    """A reward hook made of parts."""

    parts: tuple[WeightedReward, ...]

    async def __call__(self, ctx: Context, trajectory: Trajectory) -> dict[str, float]:
        """By part (`name`, or `name/key` where its hook returns several numbers) what it adds to the reward.

        Raises SlimxError for a prompt that no part fits."""
        out: dict[str, float] = {}
        for part in self._fitting(ctx.prompt):
            value = await part.hook(ctx, trajectory)
            if isinstance(value, dict):
                out |= {f"{part.name}/{key}": part.weight * each for key, each in value.items()}
            else:
                out[part.name] = part.weight * value
        return out

    def _fitting(self, prompt: Prompt) -> list[WeightedReward]:
        fitting = [part for part in self.parts if part.fits(prompt)]
        if not fitting:
            raise SlimxError(
                f"prompt {prompt.id!r} with metadata {prompt.metadata} fits no entry of reward.parts; add one for it, "
                "or one without `where`",
                code="reward.parts",
                about=prompt.id,
            )
        return fitting

    def check(self, prompts: list[Prompt]) -> None:
        """Raise SlimxError for the first prompt that no part fits."""
        for prompt in prompts:
            self._fitting(prompt)
