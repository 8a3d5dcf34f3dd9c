"""Combines several rewards into the weighted sum of the parts that match a prompt."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.rewards.context import Context

Value = float | Mapping[str, float]
type Hook[C: Context] = Callable[[C, Trajectory], Coroutine[None, None, Value | Sequence[Value]]]
"""Type of a reward hook. Repeats `slimx.rollout.hooks.Reward`, which is in a higher layer and cannot be imported
here."""


@dataclass(frozen=True, slots=True)
class WeightedReward[C: Context]:
    """One reward of a mixture, with its weight and the prompts that it applies to."""

    name: str
    hook: Hook[C]
    weight: float
    where: Mapping[str, object]
    """Metadata that a prompt must have for this reward to apply, by key."""

    def fits(self, prompt: Prompt) -> bool:
        """Returns True if the prompt's metadata has every value that `where` requires."""
        for key, value in self.where.items():
            if key not in prompt.metadata or prompt.metadata[key] != value:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Mixture[C: Context]:
    """A reward hook that combines other reward hooks."""

    parts: tuple[WeightedReward[C], ...]

    async def __call__(self, ctx: C, trajectory: Trajectory) -> dict[str, float]:
        """Returns the weighted reward of each part that matches the prompt.

        Keys are `name`, or `name/key` for a hook that returns several numbers. Raises SlimxError for a prompt that no
        part matches.
        """
        contributions: dict[str, float] = {}
        for part in self._fitting(ctx.prompt):
            value = await part.hook(ctx, trajectory)
            if isinstance(value, dict):
                for key, number in value.items():
                    contributions[f"{part.name}/{key}"] = part.weight * number
            else:
                contributions[part.name] = part.weight * cast(float, value)
        return contributions

    def _fitting(self, prompt: Prompt) -> list[WeightedReward[C]]:
        fitting = [part for part in self.parts if part.fits(prompt)]
        if not fitting:
            raise SlimxError(
                f"prompt {prompt.id!r} with metadata {prompt.metadata} matches no entry of reward.parts; add an entry "
                "whose `where` matches this metadata, or an entry without `where`",
                code="reward.parts",
                about=prompt.id,
            )
        return fitting

    def check(self, prompts: list[Prompt]) -> None:
        """Raises SlimxError for the first prompt that no part matches."""
        for prompt in prompts:
            self._fitting(prompt)
