"""Rules between configuration keys. Each rule is written once, has an error code, and is evaluated as soon as all facts
that it needs are available.

The parameters of a rule's function name the facts that it needs: sections of the configuration, or facts about the
model or the machine (`FACTS`). Each stage (load, plan, doctor, start) provides all facts of its inputs, and `broken`
evaluates every rule that needs no other input, so no stage lists its rules. Rules are defined in modules registered as
entry points of the group `slimx.rules`: in slimx (`slimx/rules/`), in extras and in other packages.
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
    "configs": "configuration",  # `Config` of each trained policy, by policy name
    "device": "device",  # device type of the run; `slimx plan` assumes cuda if cluster.device is auto
    "machine": "machine",  # GPUs and nodes assumed by `slimx plan`
    "spec": "model",
    "sizes": "model",
    "critic_view": "model",  # `trainer` section for the critic; this and the next two are None if there is no critic
    "critic_spec": "model",
    "critic_sizes": "model",
    "places": "plan",
    "trainer_memory": "plan",
    "engine_memory": "plan",
    "phases": "plan",  # GPU memory in each phase of a step
    "host": "plan",  # host memory per node
    "local_device": "local machine",  # device type of the local machine
    "weights": "weights",  # this and the next three are directories
    "critic_weights": "weights",
    "teacher_weights": "weights",
    "adapters": "weights",
    "tokenizer": "tokenizer",
    "prompts": "prompts",  # prompts of all files or sources
}
"""Names of the facts that a stage may lack, each with the input from which it is computed, the cheapest input first. A
stage has either all facts of an input or none. All other facts follow from the configuration
(`slimx.config.schema.Config.facts`), and no stage lacks them."""
Problems = Iterator[str | tuple[str, str]]
"""Error messages that a rule yields. Each is a sentence about the rule's key (`Rule.about`), or a pair of another key
and a sentence about that key. A sentence that does not contain its key is prefixed with the key and its value."""


class Refusal(SlimxError, ValueError):
    """An error that a pydantic validator can raise, so that pydantic reports it together with other errors; one Refusal
    may contain several problems."""

    problems: tuple[SlimxError, ...] = ()
    """Individual errors that this error combines."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that relates configuration keys, with the code and the key that its errors report."""

    code: str
    about: str
    """Dotted key that the errors are about, unless the rule yields an error with another key."""
    ask: Callable[..., Problems]
    """Function that receives the facts as keyword arguments and yields an error message for each fault (`Problems`). If
    it raises a SlimxError, this is also reported as a fault."""
    facts: frozenset[str]
    """Names of the facts that `ask` receives."""

    def problems(self, facts: Mapping[str, object]) -> Iterator[SlimxError]:
        """Yields the rule's errors. `facts`: facts by name, including every fact that the rule needs."""
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
    """Returns a decorator that turns a generator function into a `Rule` with the error code `code` and the key `about`.
    `facts`: names of the facts that the function receives; if empty, its parameter names are used."""
    return lambda ask: Rule(code, about, ask, frozenset(facts or inspect.signature(ask).parameters))


def rules_in(*modules: ModuleType) -> tuple[Rule, ...]:
    """Returns the rules that `modules` define, in the order of their definition; imported rules are excluded."""
    rules = []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Rule) and value.ask.__module__ == module.__name__:
                rules.append(value)
    return tuple(rules)


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Returns the rules of all entry points of `slimx.rules`, ordered by entry point name. Raises SlimxError if an
    entry point cannot be loaded."""
    return rules_in(*entry_points.load_all("slimx.rules").values())


def broken(rules: Iterable[Rule], facts: Mapping[str, object], *, before: Collection[str] = ()) -> list[SlimxError]:
    """Returns the errors of all rules that can be evaluated with `facts`. Rules that need an input of `FACTS` of which
    no fact is given are skipped, and so are rules that need only facts in `before`, the names of the facts that were
    available at an earlier stage. Raises KeyError if another rule needs a fact that is not given."""
    inputs = {None, *map(FACTS.get, facts)}  # None: the configuration
    problems: list[SlimxError] = []
    for rule in rules:
        if inputs.issuperset(map(FACTS.get, rule.facts)) and not rule.facts <= {*before}:
            problems.extend(rule.problems(facts))
    return problems


def refuse(problems: Sequence[SlimxError], where: str = "") -> None:
    """Raises one Refusal for all `problems`, with the code and key of the first; its message is `where` followed by all
    their messages, one per line. Returns if `problems` is empty. Only the first problem's cause is chained, such as an
    error in a hook, because the message says everything else."""
    if not problems:
        return
    sentences = "\n  ".join(dict.fromkeys(map(str, problems)))
    error = Refusal(where + sentences, code=problems[0].code, about=problems[0].about)
    error.problems = tuple(problems)
    raise error from problems[0].__cause__


def refuse_broken(facts: Mapping[str, object], before: Collection[str] = ()) -> None:
    """Raises one Refusal for the errors of all rules that can be evaluated with `facts`, and not with `before` alone,
    the facts of an earlier stage (`broken`)."""
    refuse(broken(all_rules(), facts, before=before))
