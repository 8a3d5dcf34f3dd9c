"""Section `reward`: reward hooks, which score rollouts, and the threads or processes that run them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimx.config.section import Faults, Label, Options, Real, Seconds, Section, Size


class RewardPart(Section):
    """One of several reward hooks whose rewards are summed, possibly only for the prompts of one data set."""

    name: str
    """Name of the part in metrics (`reward/part/NAME/mean`) and saved rollouts."""
    function: str
    """Reward hook: the name of a built-in hook (docs/hooks.md), or the dotted path of a function."""
    weight: Real = 1.0
    """Factor by which the hook's rewards are multiplied before the sum over parts."""
    where: dict[str, str | Label | Real | bool] = Field(default_factory=dict)
    """Metadata that a prompt must have for this part to score it, such as {dataset: gsm8k}; {}: all prompts."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the hook."""


class Reward(Section):
    function: str | None = "exact"
    """Reward hook: the name of a built-in hook (docs/hooks.md), or the dotted path of a function; null: none."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to `function`."""
    scope: Literal["trajectory", "group"] = "trajectory"
    """Unit that one call to `function` scores. trajectory: one trajectory; group: all trajectories of a prompt at once,
    by a hook `reward(ctx, group)` that returns a number or dict for each."""
    parts: tuple[RewardPart, ...] = ()
    """Reward hooks to use instead of `function`. The reward is the weighted sum over the parts whose `where` matches
    the prompt."""
    isolation: Literal["auto", "thread", "process"] = "auto"
    """Isolation of reward calls. thread: threads of the driver process; process: worker processes, which are killed at
    the deadline; auto: process for hooks that request it (such as math), otherwise thread."""
    deadline: Seconds = 60
    """Seconds within which the reward of a trajectory or group must be computed, including all parts."""
    workers: Size = 8
    """Maximum number of concurrent reward calls (threads or processes)."""

    @property
    def configured(self) -> bool:
        """True if a reward hook is configured."""
        return bool(self.function or self.parts)

    def _faults(self) -> Faults:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            yield (
                "reward.name_twice",
                "reward.parts",
                f"reward.parts has parts named {', '.join(names)}; give each part a unique name",
            )
        if self.parts and (self.options or self.function not in (None, type(self).model_fields["function"].default)):
            yield (
                "reward.parts_and_function",
                "reward.function",
                "reward.parts and reward.function (or reward.options) are both set, but parts replace the function; "
                "move the function into reward.parts",
            )
        if self.parts and self.scope == "group":
            yield (
                "reward.parts_scope",
                "reward.scope",
                "reward.scope is group, but reward.parts score single trajectories; use reward.function",
            )
        if self.options and self.function is None:
            yield (
                "reward.options",
                "reward.options",
                "reward.options is set but reward.function is null; set reward.function, or remove the options",
            )
