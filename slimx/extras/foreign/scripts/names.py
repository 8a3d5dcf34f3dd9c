"""Access to the flags or keys of a script, which keeps track of those that were read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimx.data.prompts.rows import read_rows
from slimx.errors import SlimxError
from slimx.extras.foreign.scripts.shell.expansion import UNSET, shown, unknown_in, without_outputs


@dataclass(slots=True)
class Names:
    """Names of a script with their values."""

    script: str
    values: Mapping[str, Sequence[str]]
    """Words by name; a flag without a value has none."""
    shown: Callable[[str], str]
    """Returns a name as it is in the script."""
    read: set[str] = field(default_factory=set)
    """Names that were asked for."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Commands whose output is left out of a value, by name."""

    def has(self, name: str) -> bool:
        """Returns True if the script sets `name`, as a flag without a value or to anything but false and null."""
        words = self.words(name)
        return words is not None and "".join(words).lower() not in ("false", "null", "none", "0")

    def words(self, name: str) -> Sequence[str] | None:
        """Returns the words of `name`; None if the script does not set it."""
        self.read.add(name)
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        """Returns the first word of `name`; None if the script does not set it, or sets it to null. Raises SlimxError
        if it contains a variable without a value."""
        words = self.words(name)
        if not words or words[0] in ("", "null", "None"):
            return None
        return self.known(name, words[0]) or None

    def number(self, name: str) -> float | None:
        """Returns the number that `name` is set to; None if the script does not set it. Raises SlimxError if it is not
        a number."""
        text = self.text(name)
        if text is None:
            return None
        with contextlib.suppress(ValueError):
            return float(text)
        raise SlimxError(
            f"{self.script}: {self.shown(name)} is {shown(text)!r}, which is not a number; correct it in the script",
            code="foreign.number",
            about=self.shown(name),
        )

    def count(self, name: str, default: int) -> int:
        """Returns the whole number that `name` is set to, or `default`."""
        number = self.number(name)
        return default if number is None else int(number)

    def known(self, name: str, text: str) -> str:
        """Returns `text`, a value of `name`, without the outputs of commands. Raises SlimxError if it contains a
        variable that the script does not set."""
        missing = unknown_in(text)
        if UNSET in text:
            raise SlimxError(
                f"{self.script}: {self.shown(name)} uses the variable {missing[0]}, which the script does not set; "
                f"add {missing[0]}=VALUE to the command",
                code="foreign.variable",
                about=missing[0],
            )
        if missing:
            self.outputs[name] = missing[0]
        return without_outputs(text)

    def rest(self) -> list[str]:
        """Returns the names that were not asked for, in the order of the script."""
        return [name for name in self.values if name not in self.read]


def whole(value: float) -> int | float:
    """Returns `value` as an int if it is a whole number."""
    return int(value) if value == int(value) else value


def rows_of(path: str) -> int | None:
    """Returns the number of prompts in the file at `path`; None if there is no such file here."""
    return sum(1 for _ in read_rows(path)[1]) if Path(path).expanduser().is_file() else None
