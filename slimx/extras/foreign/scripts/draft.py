"""The configuration that a script of another framework is turned into, with what was left out, and its text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from slimx.config.rule import Refusal
from slimx.config.schema import Config
from slimx.config.suggestions import known_keys
from slimx.extras.foreign.commented_yaml import lines_of, loaded, on_one_line, tree_of
from slimx.observability.live.safe_text import one_line

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
WIDTH = 116
"""Maximum width of a comment in the text."""


def scalar(text: str) -> object:
    """Returns the value that `text` has as a value of YAML; 1e-6 is a number, too."""
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return text
    return value if isinstance(value, bool | None) or text[0] in "[{" else text


@dataclass(slots=True)
class Draft:
    """Configuration in the making."""

    origin: str
    """Name of the script, and of the command that reads it."""
    settings: dict[str, object] = field(default_factory=dict)
    """Values by dotted key; an entry of a list is addressed by its index."""
    sources: dict[str, str] = field(default_factory=dict)
    """Flag, formula or default that each value comes from, by dotted key."""
    left: dict[str, str] = field(default_factory=dict)
    """Reasons by the name, in the script, of what has no counterpart."""
    unneeded: dict[str, str] = field(default_factory=dict)
    """Reasons by the name of what needs no key."""
    supply: dict[str, str] = field(default_factory=dict)
    """Values that the reader must still supply, described by dotted key."""

    def put(self, key: str, value: object, source: str) -> None:
        """Sets `key` to `value`. `source`: the flag, formula or default that the value comes from."""
        self.settings[key] = value
        self.sources[key] = source

    def get(self, key: str, default: object = None) -> object:
        """Returns the value of `key`; `default` if it is not set."""
        return self.settings.get(key, default)

    def count(self, key: str, default: int = 0) -> int:
        """Returns the whole number that `key` is set to; `default` if it is not set."""
        return int(str(self.get(key, default)))

    def remove(self, key: str) -> None:
        """Removes `key` and all keys below it."""
        for name in [name for name in self.settings if name == key or name.startswith(key + ".")]:
            del self.settings[name]
            self.sources.pop(name, None)

    def text(self) -> tuple[str, tuple[str, ...]]:
        """Returns the YAML text with its comments, and the reasons for which slimx refuses this configuration; the text
        lists them, too."""
        comments = dict(self.sources)
        for key in self.supply.keys() & comments.keys():
            comments[key] = "; ".join(filter(None, (comments[key], "supply: " + self.supply[key])))
        tree = tree_of({key: self.settings[key] for key in sorted(self.settings, key=_place)})
        body = list(lines_of(tree, comments))
        refusals = refused("\n".join(body))
        parts = ["# Written from " + one_line(self.origin) + "."]
        parts += _comment("slimx refuses this configuration", {str(n): text for n, text in enumerate(refusals, 1)})
        parts += _comment("You must still supply", self.supply)
        parts += body
        parts += _comment("No counterpart", self.left)
        parts += _comment("No key needed", _by_reason(self.unneeded))
        return "\n".join(parts) + "\n", refusals


def refused(text: str) -> tuple[str, ...]:
    """Returns the sentences with which slimx refuses the configuration `text`; none if it is accepted."""
    try:
        loaded(text, "run.yaml")
    except Refusal as error:
        return tuple(str(problem).replace("run.yaml: ", "") for problem in error.problems)
    return ()


def _place(key: str) -> tuple[int, str]:
    """Returns what sorts `key` into the order of slimx's configuration; lists come in the order of their indices."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    known = known_keys(Config)
    indices = "".join(f"{part:>4}" for part in key.split(".") if part.isdigit())
    while parts and ".".join(parts) not in known:
        parts.pop()
    name = ".".join(parts)
    return (known.index(name) if name in known else len(known)), indices


def _comment(title: str, entries: Mapping[str, str]) -> list[str]:
    """Returns the lines of a comment that lists `entries`; none if there are none."""
    if not entries:
        return []
    lines = ["# " + title + ":"]
    for name, text in entries.items():
        lines += textwrap.wrap(
            one_line(name + ": " + text),
            WIDTH,
            initial_indent="#   ",
            subsequent_indent="#     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _by_reason(entries: Mapping[str, str]) -> Mapping[str, str]:
    """Returns `entries` turned around: the names of each reason, separated by commas."""
    names: dict[str, list[str]] = {}
    for name, reason in entries.items():
        names.setdefault(reason, []).append(name)
    return {reason: ", ".join(sorted(group)) for reason, group in names.items()}


def joined(words: Sequence[str]) -> str:
    """Returns `words` as a value of YAML: the only one, or a list of them."""
    return words[0] if len(words) == 1 else on_one_line([scalar(word) for word in words])
