"""Access to the flags or keys of a script, which keeps track of those that were read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slimx.config.suggestions import OFF
from slimx.data.prompts.rows import read_rows
from slimx.errors import SlimxError
from slimx.extras.foreign.commented_yaml import on_one_line
from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.shell.expansion import COMPUTED, UNSET, unknown_in, without_outputs
from slimx.extras.foreign.scripts.shell.expansion import shown as readable
from slimx.extras.foreign.scripts.shell.files import text_of


@dataclass(slots=True)
class Names:
    """Names of a script with their values."""

    draft: Draft
    """Configuration that the names mean."""
    values: Mapping[str, Sequence[str]]
    """Words by name; a flag without a value has none."""
    shown: Callable[[str], str]
    """Returns a name as it is in the script."""
    read: set[str] = field(default_factory=set)
    """Names that were asked for."""
    outputs: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Computed part of a value, such as a command's output, by name; True if it is the whole value, or the start of a
    path."""

    @property
    def script(self) -> str:
        """Returns the name of the script."""
        return self.draft.origin.partition(" ")[0]

    def has(self, name: str) -> bool:
        """Returns True if the script sets `name`, as a flag without a value or to anything but false, no, null, 0
        and nothing. Raises SlimxError if the value contains a variable without a value."""
        words = self.words(name)
        return words == [] or (self.text(name) or "0").lower() not in OFF

    def words(self, name: str) -> Sequence[str] | None:
        """Returns the words of `name`; None if the script does not set it."""
        self.read.add(name)
        return self.values.get(name)

    def text(self, *names: str) -> str | None:
        """Returns the first word of the first of `names` that the script sets to anything but null; None if it sets
        none. Raises SlimxError if the word contains a variable without a value."""
        found = None
        for name in names:
            words = self.words(name)
            if found is None and words and words[0] not in ("", "null", "None", "none"):
                found = self.known(name, words[0]) or None
        return found

    def number(self, *names: str) -> float | None:
        """Returns the number that the first of `names` is set to; None if the script sets none, computes it, or
        leaves it to the program's start. Raises SlimxError if it is not a number."""
        self.read.update(names)
        for name in names:
            text = self.text(name)
            if name in self.outputs:
                self.outputs[name] = self.outputs[name][0], True
            elif text is not None:
                with contextlib.suppress(ValueError):
                    return float(text)
                if not re.fullmatch(r"auto|gpu|cpu|\d+:\d+", text):  # as torchrun counts GPUs and nodes
                    raise SlimxError(
                        f"{self.script}: {self.shown(name)} is {readable(text)!r}, which is not a number; correct it "
                        "there",
                        code="foreign.number",
                        about=self.shown(name),
                    )
                self.outputs[name] = text, True
        return None

    def number_or(self, default: float, *names: str) -> float:
        """Returns the number that the first of `names` is set to, or `default`."""
        number = self.number(*names)
        return default if number is None else number

    def count(self, name: str, default: int) -> int:
        """Returns the whole number that `name` is set to, or `default`."""
        return int(self.number_or(default, name))

    def known(self, name: str, text: str) -> str:
        """Returns `text`, a value of `name`, without what the script computes in it. Raises SlimxError if it contains a
        variable that the script does not set."""
        missing = unknown_in(text)
        if UNSET in text:
            raise SlimxError(
                f"{self.script}: {self.shown(name)} uses ${missing[0]}, which has no value in the script; "
                f"add {missing[0]}=VALUE to the command",
                code="foreign.variable",
                about=missing[0],
            )
        left = without_outputs(text)
        if missing:
            self.outputs[name] = missing[0], left[:1] in ("", "/") and text.startswith(COMPUTED)
        return left

    def listed(self, name: str) -> list[str]:
        """Returns the words of `name`, without what the script computes in them; none if it does not set it."""
        return [self.known(name, word) for word in self.words(name) or ()]

    def rest(self) -> list[str]:
        """Returns the names that were not asked for, in the order of the script."""
        return [name for name in self.values if name not in self.read]


def whole(value: float) -> int | float:
    """Returns `value` as an int if it is a whole number."""
    return int(value) if value == int(value) else value


def word_of(value: object) -> str:
    """Returns `value` as a word of a command line."""
    return on_one_line(value) if isinstance(value, dict | list) else str(value)


def rows_of(path: str) -> int | None:
    """Returns the number of prompts in the file at `path`; None if there is no such file here."""
    return sum(1 for _ in read_rows(path)[1]) if Path(path).expanduser().is_file() else None


def yaml_in(file: Path, text: str | None = None) -> dict[str, Any]:
    """Returns the mapping in the YAML file `file`. `text`: what it contains, if it is not here. Raises SlimxError if it
    is not YAML, or no mapping."""
    try:
        content = yaml.safe_load(text_of(file) if text is None else text)
    except yaml.YAMLError as error:
        problem = str(error).partition("\n")[0]
        raise SlimxError(
            f"{file} is not YAML ({problem}); correct the file", code="foreign.not_yaml", about=str(file)
        ) from error
    if not isinstance(content, dict):
        raise SlimxError(
            f"{file} has no keys; give a YAML file with names and values", code="foreign.not_yaml", about=str(file)
        )
    return content
