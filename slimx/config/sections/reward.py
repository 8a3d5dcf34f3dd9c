"""Section reward: reward hooks of a rollout, and the processes that they run in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimx.config.section import Faults, Label, Options, Real, Seconds, Section, Size


class RewardPart(Section):
    """One of several rewards that are summed, or the reward for prompts of one data set."""

    name: str
    """Name of the part in metrics (`reward/part/NAME/mean`) and saved rollouts."""
    function: str
    """Reward hook: the name of a built-in one (docs/hooks.md), or a dotted path."""
    weight: Real = 1.0
    """Factor applied to the hook's rewards."""
    where: dict[str, str | Label | Real | bool] = Field(default_factory=dict)
    """Metadata of the prompts that this part judges, such as {dataset: gsm8k}; {}: all prompts."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the hook."""


class Reward(Section):
    function: str | None = "exact"
    """Reward hook: the name of a built-in one (docs/hooks.md), or a dotted path; null: none."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of `function`."""
    scope: Literal["trajectory", "group"] = "trajectory"
    """Unit that one call of `function` judges. trajectory: one trajectory; group: all trajectories of a prompt at once,
    reward(ctx, group) -> one number (or dict) for each."""
    parts: tuple[RewardPart, ...] = ()
    """Several hooks instead of `function`. A reward is the weighted sum of the parts that judge the prompt."""
    isolation: Literal["auto", "thread", "process"] = "auto"
    """Isolation of reward calls. thread: threads of the driver; process: processes that are killed at the deadline;
    auto: process for hooks that request it (such as math), else thread."""
    deadline: Seconds = 60
    """Seconds for one reward call, including all parts."""
    workers: Size = 8
    """Reward calls that run concurrently (threads or processes)."""

    @property
    def configured(self) -> bool:
        """True if there is any reward."""
        return bool(self.function or self.parts)

    def _faults(self) -> Faults:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            yield (
                "reward.name_twice",
                "reward.parts",
                f"reward.parts has a name twice in {names}; give each part its own name",
            )
        if self.parts and (self.options or self.function not in (None, type(self).model_fields["function"].default)):
            yield (
                "reward.parts_and_function",
                "reward.function",
                "reward.parts and reward.function (or reward.options) are both set, but parts replace the function; "
                "make it one of the parts",
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
                "reward.options is set but reward.function is null; set the function, or leave the options out",
            )
