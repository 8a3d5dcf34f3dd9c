"""Variables of a shell script, and the signs that stand for values that are not known."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimx.errors import SlimxError

UNSET, COMPUTED, END = "\ue000", "\ue001", "\ue002"
"""Signs (of Unicode's private use area) around the name of a variable without a value, or around the text of a command
whose output is unknown."""
UNKNOWN = re.compile(f"[{UNSET}{COMPUTED}][^{END}]*{END}")
ANY = COMPUTED
"""Key of the value that all elements of an array have which are not known."""
EXTENDED = re.compile(r"[?*+@!]\(|\[:")
"""Parts of a pattern that are not read here, as @(a|b) and [[:digit:]]."""
_EFFORT = 5_000_000
"""Commands and characters of values that reading a script may take."""


def unknown_in(text: str) -> list[str]:
    """Returns the names of the variables, and the commands, whose values `text` needs and does not have."""
    return [found[1:-1] for found in UNKNOWN.findall(text)]


def without_unset(text: str) -> str:
    """Returns `text` as the shell sees it: variables that are not set are empty."""
    return re.sub(f"{UNSET}[^{END}]*{END}", "", text)


def without_outputs(text: str) -> str:
    """Returns `text` without outputs of commands, which are unknown, and the signs that join them to the rest."""
    return re.sub(f"[-_]?{COMPUTED}[^{END}]*{END}[-_]?", "", text)


def shown(text: str) -> str:
    """Returns `text` with `$NAME` for every unknown value."""
    return UNKNOWN.sub(lambda match: "$" + match[0][1:-1], text)


def computed(text: str) -> str:
    """Returns the unknown value that the expression or command `text` has."""
    return COMPUTED + shown(text) + END


def numbered(values: Iterable[str], start: int = 0) -> dict[str, str]:
    """Returns the elements of an array by key, from the key `start` on."""
    return {str(key): value for key, value in enumerate(values, start)}


def element(elements: Mapping[str, str] | None, key: str) -> str:
    """Returns an element of an array; an empty text if it is not set."""
    return (elements or {}).get(key, (elements or {}).get(ANY, ""))


def next_key(elements: Mapping[str, str]) -> int:
    """Returns the key after the last one of an array."""
    return 1 + max((int(key) for key in elements if re.fullmatch(r"[0-9]{1,19}", key)), default=-1)


@dataclass(slots=True)
class Variables:
    """Variables of a script."""

    script: Path
    """File that is read; a file that it names replaces it for a while."""
    overrides: Mapping[str, str]
    """Values that the user gave; the script does not change them."""
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    """Elements by key, by name; a variable that is no array has the key 0. `@` has the arguments from 1."""
    keyed: set[str] = field(default_factory=set)
    """Names of arrays whose keys are texts."""
    typed: set[str] = field(default_factory=set)
    """Names that `declare` gives a type, or to another variable: what they have is unknown."""
    locals: list[dict[str, dict[str, str] | None]] = field(default_factory=list)
    """For every open function, what its local variables were outside."""
    folder: str = "."
    """Working directory."""
    status: bool | None = True
    """True if the last command succeeded; None if that is unknown."""
    effort: int = _EFFORT

    def spend(self, amount: int) -> None:
        """Counts `amount` commands or characters. Raises SlimxError if the script takes too many."""
        self.effort -= amount
        if self.effort < 0:
            raise SlimxError(
                f"{self.script} repeats or grows without an end in sight; give a file with only the flags",
                code="foreign.endless",
                about=str(self.script),
            )

    def elements(self, name: str) -> dict[str, str] | None:
        """Returns the elements of the variable `name` by key; None if it is not set."""
        if name in self.overrides:
            return {"0": self.overrides[name]}
        if name in self.typed:
            return {ANY: computed(name)}
        if name in self.values:
            return self.values[name]
        if name.isdigit() and name in self.values.get("@", {}):
            return {"0": self.values["@"][name]}
        standard = {
            "HOME": "~",
            "IFS": " \t\n",
            "PWD": self.folder,
            "0": str(self.script),
            "BASH_SOURCE": str(self.script),
            "#": str(len(self.values.get("@", {}))),
            "?": {None: computed("?"), True: "0", False: "1"}[self.status],
        } | dict.fromkeys("$!-", computed("$"))
        return {"0": standard[name]} if name in standard else None

    def store(self, name: str, value: str, key: str = "0", *, append: bool = False) -> None:
        """Sets the element `key` of the variable `name`. `append`: add to its text."""
        elements = dict(self.values.get(name, {}))
        elements[key] = element(elements, key) * append + value
        self.spend(len(elements) + len(elements[key]))
        self.values[name] = elements

    def restore(self, before: Mapping[str, dict[str, str] | None]) -> None:
        """Gives variables the values `before`; None if they were not set."""
        for name, elements in before.items():
            self.values.pop(name, None)
            if elements is not None:
                self.values[name] = elements

    def set_arguments(self, words: Sequence[str]) -> None:
        """Sets the arguments `$1`, `$2` and on."""
        self.values["@"] = numbered(words, 1)


def edited(value: str, sign: str, pattern: str, variables: Variables) -> str:
    """Returns `value` changed by a parameter expansion: `#` and `%` remove what matches `pattern` at the start and end,
    `,` and `^` change letters; a doubled sign means the longest, or every letter."""
    if sign[0] in ",^":
        end = len(value) if sign[1:] else 1
        changed = value[:end].lower() if sign[0] == "," else value[:end].upper()
        return changed + value[end:]
    variables.spend(len(value) ** 2)
    matcher = re.compile(fnmatch.translate(pattern.replace("[^", "[!")))
    lengths = range(len(value) + 1)
    for length in lengths[::-1] if len(sign) == 2 else lengths:
        kept = len(value) - length
        if sign[0] == "#" and matcher.fullmatch(value, 0, length):
            return value[length:]
        if sign[0] == "%" and matcher.fullmatch(value, kept):
            return value[:kept]
    return value
