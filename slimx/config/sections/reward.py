"""Sections `reward` and `eval`: reward hooks, which score rollouts, the threads or processes that run them, and
evaluation on held-out prompts."""

from __future__ import annotations

from itertools import count, takewhile
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from slimx.config.section import (
    Amount,
    Count,
    Faults,
    Label,
    Options,
    PathText,
    Real,
    Seconds,
    Section,
    Size,
    Weight,
)
from slimx.config.sections.engines import EvaluationEngines
from slimx.config.sections.rollout import RowFields


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


class EvalSet(Section):
    """A set of held-out prompts with settings of its own. null: the value of section `eval`; `fields` and `map` replace
    both of its keys."""

    path: PathText
    """File of held-out prompts in a format of `rollout.prompts`."""
    fields: RowFields | None = None
    """Columns of this set's rows; null: `eval.fields`."""
    map: str | None = None
    """Hook for this set's rows, as `eval.map`; null: `eval.map`."""
    samples: Amount | None = None
    """Number of answers per prompt; null: `eval.samples`."""
    pass_at: tuple[Amount, ...] | None = None
    """Values of k for which eval/NAME/pass@k is reported; null: `eval.pass_at`."""
    temperature: Weight | None = None
    """Softmax temperature of the answers; null: `eval.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability mass for nucleus sampling; null: `eval.top_p`."""
    max_new_tokens: Amount | None = None
    """Maximum number of tokens sampled per turn; null: `eval.max_new_tokens`."""

    @property
    def changes(self) -> dict[str, object]:
        """Values of this set, by key, that replace those of section `eval`."""
        values = {key: value for key, value in self if key != "path" and value is not None}
        if self.fields or self.map:
            values |= {"fields": self.fields, "map": self.map}
        return values


def _entries(prompts: object) -> object:
    """Returns the value of `eval.prompts` as a mapping from names to mappings; a single file has the name ""."""
    if isinstance(prompts, str):
        prompts = {"": prompts}
    if not isinstance(prompts, dict):
        return prompts
    return {name: {"path": entry} if isinstance(entry, str) else entry for name, entry in prompts.items()}


class Eval(Section):
    prompts: Annotated[dict[str, EvalSet], BeforeValidator(_entries)] | None = None
    """File of held-out prompts in a format of `rollout.prompts`, or a mapping from names of sets to files or to
    mappings with the following keys; null: no evaluation. A set's name becomes metadata.dataset of prompts without one,
    so that `reward.parts` can select a reward by set. A key that is null has the value of section `eval`."""
    fields: RowFields | None = None
    """Columns of rows that are not in slimx's format; null: all rows are in that format. `rollout.fields` and
    `rollout.map` apply only to training prompts; `rollout.system` and `rollout.template` apply to all prompts."""
    map: str | None = None
    """Dotted path of a hook to use instead of `fields`, as for `rollout.map`; it may be the same hook. null: none."""
    every: Count | None = None
    """Number of steps between evaluations; null: evaluate only before and after the run; 0: never."""
    samples: Amount = 1
    """Number of answers per prompt. eval/accuracy is their mean reward; eval/pass@k is reported for k <= `samples`."""
    pass_at: tuple[Amount, ...] = ()
    """Values of k for which eval/pass@k is reported, at most `samples` each; empty: 2, 4, 8, ... up to `samples`."""
    temperature: Weight = 0.0
    """Softmax temperature of the answers; 0: greedy sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass for nucleus sampling, if `temperature` is above 0; 1: the whole distribution."""
    max_new_tokens: Amount | None = None
    """Maximum number of tokens sampled per turn; null: `rollout.sampling.max_new_tokens`."""
    passing: Real = 1.0
    """Minimum reward at which an answer counts as correct in pass@k and in the lengths of correct and wrong answers."""
    engines: tuple[EvaluationEngines, ...] = ()
    """Groups of engine servers that evaluate while training goes on, with the keys of `rollout.engines`; empty: the
    engines of `rollout.engines` evaluate, and training waits for them."""
    deadline: Seconds = 3600
    """Seconds for which training waits for the evaluation of an earlier step on `eval.engines`; after that the
    evaluation is given up and counted (`eval/lost`)."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k for which pass@k is reported, in ascending order."""
        doubled = takewhile(lambda k: k <= self.samples, (2**n for n in count(1)))
        return tuple(sorted(set(self.pass_at or doubled)))

    @property
    def _used(self) -> dict[str, EvalSet]:
        return {} if self.every == 0 else self.prompts or {}

    @property
    def files(self) -> dict[str, str]:
        """Files of held-out prompts by name, which is "" for a single file; empty if the run does not evaluate."""
        return {name: entry.path for name, entry in self._used.items()}

    @property
    def sets(self) -> dict[str, Eval]:
        """Settings of each set of held-out prompts by its name in `files`: this section with the set's own values."""
        return {name: self.model_copy(update=entry.changes) for name, entry in self._used.items()}
