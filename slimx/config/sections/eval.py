"""Section `eval`: evaluation on held-out prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, PrivateAttr

from slimx.config.section import Amount, Count, Faults, PathText, Real, Seconds, Section, TopP, Weight
from slimx.config.sections.engines import Engines
from slimx.config.sections.rollout import RowFields


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
    top_p: TopP | None = None
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


class EvalEngines(Engines):
    """A group of evaluation engines, which evaluate during training and generate no training data."""

    _key: str = PrivateAttr(default="eval.engines")
    name: str = "eval"
    """Name of the group in logs and metrics."""


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
    top_p: TopP = 1.0
    """Probability mass for nucleus sampling, if `temperature` is above 0; 1: the whole distribution."""
    max_new_tokens: Amount | None = None
    """Maximum number of tokens sampled per turn; null: `rollout.sampling.max_new_tokens`."""
    passing: Real = 1.0
    """Minimum reward at which an answer counts as correct in pass@k and in the lengths of correct and wrong answers."""
    engines: tuple[EvalEngines, ...] = ()
    """Evaluation engines: groups of engine servers that evaluate while training goes on, with the keys of
    `rollout.engines`; empty: the engines of `rollout.engines` evaluate, and training waits for them."""
    deadline: Seconds = 3600
    """Seconds for which training waits for the evaluation of an earlier step on `eval.engines`, and the end of the run
    for that of the last step; after that the evaluation is given up and counted (`eval/lost`)."""

    def _faults(self) -> Faults:
        for group in self.engines:
            yield from group.faults()

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k for which pass@k is reported, in ascending order."""
        doubled = [2**n for n in range(1, self.samples.bit_length())]
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
