"""Section reward: what a rollout is worth, by which hooks, and where these run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slimx.config.section import Faults, Label, Real, Seconds, Section, Size


class RewardPart(Section):
    """One of several rewards that are summed, or one for the prompts of one dataset."""

    name: str
    """Name of the part in metrics (`reward/part/NAME/mean`) and saved rollouts."""
    function: str
    """Name of one of slimx's reward hooks (docs/hooks.md), or the dotted path of yours."""
    weight: Real = 1.0
    """Factor of everything that the hook returns."""
    where: dict[str, str | Label | Real | bool] = Field(default_factory=dict)
    """Metadata that a prompt must have for this part to judge it, such as {dataset: gsm8k}; {}: any."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the hook."""


class Reward(Section):
    function: str | None = "exact"
    """Name of one of slimx's reward hooks (docs/hooks.md), or the dotted path of yours; null: none."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`."""
    scope: Literal["trajectory", "group"] = "trajectory"
    """Unit that one call of `function` judges: a trajectory, or all trajectories of a prompt at once, reward(ctx,
    group) -> one number (or dict) for each."""
    parts: tuple[RewardPart, ...] = ()
    """Several hooks instead of `function`: a reward is the weighted sum of those that fit the prompt."""
    isolation: Literal["auto", "thread", "process"] = "auto"
    """Place of reward calls. thread: in the driver; process: in processes that are killed at the deadline; auto:
    process where a hook asks for it (math does)."""
    deadline: Seconds = 60
    """Seconds for one reward call, all parts together."""
    workers: Size = 8
    """Reward calls that run at once (threads or processes)."""

    @property
    def given(self) -> bool:
        """True if there is any reward."""
        return bool(self.function or self.parts)

    def _faults(self) -> Faults:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            yield (
                "reward.name_twice",
                "reward.parts",
                f"reward.parts names a part twice in {names}; give each its own name",
            )
        if self.parts and (self.options or self.function not in (None, type(self).model_fields["function"].default)):
            yield (
                "reward.parts_and_function",
                "reward.function",
                "reward.parts is given and so is reward.function (or reward.options), which parts replace; make the "
                "function one of the parts",
            )
        if self.parts and self.scope == "group":
            yield (
                "reward.parts_scope",
                "reward.scope",
                "reward.scope is group, but reward.parts judge one trajectory each; use reward.function",
            )
        if self.options and self.function is None:
            yield (
                "reward.options",
                "reward.options",
                "reward.options is given but reward.function is null; name the function or leave it out",
            )
