"""A rule between keys: written once, with a code, and asked as soon as everything that it needs is known.

The parameters of a rule's function are the facts that it needs, by name: sections of the configuration, the model, the
machine (`FACTS`). A moment (load, plan, doctor, start) brings facts, and `broken` asks every rule that these suffice
for; no moment lists its rules. They are in modules that are entry points of the group `slimx.rules`: those of the core
(`slimx/rules/`), of extras and of other packages.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from slimx import entry_points
from slimx.errors import SlimxError

FACTS = {
    "configuration": (
        "device",  # that the run is meant for: where it is left open, a plan's is cuda
        "machine",  # GPUs and nodes that `slimx plan` is for
        "configs",  # of each trained policy by its name
    ),
    "model": (
        "spec",
        "sizes",
        "critic_view",  # the `trainer` section that the critic's ranks follow; None without a critic, as are:
        "critic_spec",
        "critic_sizes",
        "places",
        "trainer_memory",
        "engine_memory",
        "phases",  # memory of a GPU in every phase of a step
        "host",  # memory of a node's host
    ),
    "machine": ("local_device",),  # of the machine that asks
    "weights": ("weights", "critic_weights", "teacher_weights", "adapters"),  # directories
    "tokenizer": ("tokenizer",),
    "prompts": ("prompts",),  # of all sources
}
"""Facts that a rule can ask for in addition to the sections of a configuration (`slimx.config.schema.Config`), by what
must be at hand to know them, the cheapest first."""
Problems = Iterator[str | tuple[str, str]]
"""Sentences of a rule, or the key that one is about and the sentence. One that does not name the key gets it, with its
value, in front."""


class Refusal(SlimxError, ValueError):
    """A refusal that pydantic collects when it is raised in a validator; `problems` has those that it joins."""

    problems: tuple[SlimxError, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with the code of its refusals and the key that they are about. `ask` yields a sentence for each fault,
    with another key where it is about one; a SlimxError that it raises counts, too."""

    code: str
    about: str
    ask: Callable[..., Problems]
    facts: frozenset[str]
    """Names of the facts that it needs."""

    def problems(self, facts: Mapping[str, Any]) -> Iterator[SlimxError]:
        """Refusals by this rule of `facts`, which suffice."""
        try:
            for found in self.ask(**{name: facts[name] for name in self.facts}):
                about, sentence = (self.about, found) if isinstance(found, str) else found
                yield SlimxError(_naming(about, sentence, facts), code=self.code, about=about)
        except SlimxError as error:
            named = SlimxError(str(error), code=error.code or self.code, about=error.about or self.about)
            named.__cause__ = error.__cause__  # such as an error of a user's hook
            yield named


def _naming(about: str, sentence: str, facts: Mapping[str, Any]) -> str:
    if about in sentence:
        return sentence
    value: Any = facts
    for name in about.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if not isinstance(value, (str, int, float)):
        return f"{about}: {sentence}"
    plain = value if isinstance(value, str) else json.dumps(value)
    return f"{about} is {plain}: {sentence}"


def rule(code: str, about: str, *, facts: Iterable[str] = ()) -> Callable[[Callable[..., Problems]], Rule]:
    """Make a rule of a generator function. `facts`: those that it needs, where its parameters do not name them."""
    return lambda ask: Rule(code, about, ask, frozenset(facts or inspect.signature(ask).parameters))


def rules_in(*modules: ModuleType) -> tuple[Rule, ...]:
    """Rules that the modules define, in the order of their definition."""
    return tuple(
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Rule) and value.ask.__module__ == module.__name__
    )


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Rules of all entry points, in the order of their names. Raises SlimxError for one that cannot be loaded."""
    return rules_in(*entry_points.load_all("slimx.rules").values())


def broken(rules: Iterable[Rule], facts: Mapping[str, Any], *, before: Collection[str] = ()) -> list[SlimxError]:
    """Refusals by all rules that `facts` suffice for, but for those that the facts `before` sufficed for."""
    return [
        problem
        for rule in rules
        if rule.facts <= facts.keys() and not rule.facts <= {*before}
        for problem in rule.problems(facts)
    ]


def refuse(problems: Sequence[SlimxError], where: str = "", cause: Exception | None = None) -> None:
    """Raise a Refusal with all sentences after `where`, and the code of the first; nothing without problems."""
    if not problems:
        return
    sentences = "; ".join(dict.fromkeys(map(str, problems)))
    error = Refusal(where + sentences, code=problems[0].code, about=problems[0].about)
    error.problems = tuple(problems)
    raise error from cause or problems[0].__cause__
