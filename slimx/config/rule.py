"""Rules between keys: each is written once, with a code, and evaluated as soon as all its facts are available.

The parameters of a rule's function are the facts that it needs, by name: sections of the configuration, the model, the
machine (`FACTS`). Each stage (load, plan, doctor, start) provides facts, and `broken` evaluates every rule for which
they suffice; no stage lists its rules. Rules are in modules that are entry points of the group `slimx.rules`: those of
the core (`slimx/rules/`), of extras and of other packages.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from slimx import entry_points
from slimx.errors import SlimxError

FACTS = {
    "configuration": (
        "device",  # device of the run; cuda for a plan if the configuration leaves it open
        "machine",  # GPUs and nodes assumed by `slimx plan`
        "configs",  # configuration of each trained policy by name
    ),
    "model": (
        "spec",
        "sizes",
        "critic_view",  # `trainer` section of the critic's ranks; this and the next two are None without a critic
        "critic_spec",
        "critic_sizes",
        "places",
        "trainer_memory",
        "engine_memory",
        "phases",  # memory of a GPU in each phase of a step
        "host",  # host memory of a node
    ),
    "machine": ("local_device",),  # device of the local machine
    "weights": ("weights", "critic_weights", "teacher_weights", "adapters"),  # directories
    "tokenizer": ("tokenizer",),
    "prompts": ("prompts",),  # prompts of all sources
}
"""Facts available to rules in addition to the sections of a configuration (`slimx.config.schema.Config`), by what
they require, the cheapest first."""
Problems = Iterator[str | tuple[str, str]]
"""Sentences of a rule, or pairs of the key that a sentence is about and the sentence. A sentence without its key gets
the key and its value as a prefix."""


class Refusal(SlimxError, ValueError):
    """A refusal that pydantic collects when a validator raises it."""

    problems: tuple[SlimxError, ...] = ()
    """Refusals joined in this one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with a code and a key for its refusals."""

    code: str
    about: str
    """Key that refusals are about."""
    ask: Callable[..., Problems]
    """Yields a sentence for each fault, with a key if that is not `about`. A SlimxError that it raises is a fault
    too."""
    facts: frozenset[str]
    """Names of the facts that `ask` needs."""

    def problems(self, facts: Mapping[str, object]) -> Iterator[SlimxError]:
        """Yields the refusals of `facts`, which must contain those of the rule."""
        try:
            for problem in self.ask(**{name: facts[name] for name in self.facts}):
                about, sentence = (self.about, problem) if isinstance(problem, str) else problem
                yield SlimxError(_naming(about, sentence, facts), code=self.code, about=about)
        except SlimxError as error:
            named = SlimxError(str(error), code=error.code or self.code, about=error.about or self.about)
            named.__cause__ = error.__cause__  # for example an error of a user's hook
            yield named


def _naming(about: str, sentence: str, facts: Mapping[str, object]) -> str:
    if about in sentence:
        return sentence
    value: object = facts
    for name in about.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if not isinstance(value, (str, int, float)):
        return f"{about}: {sentence}"
    plain = value if isinstance(value, str) else json.dumps(value)
    return f"{about} is {plain}: {sentence}"


def rule(code: str, about: str, *, facts: Iterable[str] = ()) -> Callable[[Callable[..., Problems]], Rule]:
    """Returns a decorator that makes a rule of a generator function. `facts`: names of the facts that it needs;
    default: those of its parameters."""
    return lambda ask: Rule(code, about, ask, frozenset(facts or inspect.signature(ask).parameters))


def rules_in(*modules: ModuleType) -> tuple[Rule, ...]:
    """Returns the rules that the modules define, in the order of their definition."""
    rules = []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Rule) and value.ask.__module__ == module.__name__:
                rules.append(value)
    return tuple(rules)


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Returns the rules of all entry points, in the order of their names. Raises SlimxError if one cannot be loaded."""
    return rules_in(*entry_points.load_all("slimx.rules").values())


def broken(rules: Iterable[Rule], facts: Mapping[str, object], *, before: Collection[str] = ()) -> list[SlimxError]:
    """Returns the refusals of all rules for which `facts` suffice, except rules for which the facts named in `before`
    suffice."""
    problems: list[SlimxError] = []
    for rule in rules:
        if rule.facts <= facts.keys() and not rule.facts <= {*before}:
            problems.extend(rule.problems(facts))
    return problems


def refuse(problems: Sequence[SlimxError], where: str = "", cause: Exception | None = None) -> None:
    """Raises Refusal with `where`, all sentences and the code of the first problem; returns if there are none."""
    if not problems:
        return
    sentences = "; ".join(dict.fromkeys(map(str, problems)))
    error = Refusal(where + sentences, code=problems[0].code, about=problems[0].about)
    error.problems = tuple(problems)
    raise error from cause or problems[0].__cause__
