"""The configuration that a script of another framework is turned into, with what was left out, and its text."""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from slimx.config.load import load_config
from slimx.config.rule import Refusal
from slimx.config.schema import Config
from slimx.config.suggestions import known_keys
from slimx.errors import SlimxError
from slimx.json_types import Json

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
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | list | dict | None) else text


@dataclass(slots=True)
class Draft:
    """Configuration in the making."""

    origin: str
    """Name of the script, and of the command that reads it."""
    settings: dict[str, object] = field(default_factory=dict)
    """Values by dotted key; an entry of a list is addressed by its index."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where the value of a key comes from, by dotted key."""
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

    def remove(self, key: str) -> None:
        """Removes `key` and all keys below it."""
        for name in [name for name in self.settings if name == key or name.startswith(f"{key}.")]:
            del self.settings[name]
            self.sources.pop(name, None)

    def tree(self) -> Json:
        """Returns the settings as nested values, with the sections in the order of slimx's configuration."""
        return _listed(_nested(self.settings))

    def text(self) -> tuple[str, tuple[str, ...]]:
        """Returns the YAML text with its comments, and the reasons for which slimx refuses this configuration; the text
        lists them, too."""
        body = list(_lines(self.tree(), (), self.sources, self.supply))
        refusals = refused("\n".join(body))
        parts = [f"# Written from {self.origin}."]
        parts += _comment("slimx refuses this configuration", {str(n): text for n, text in enumerate(refusals, 1)})
        parts += _comment("You must still supply", self.supply)
        parts += body
        parts += _comment("No counterpart", self.left)
        parts += _comment("No key needed", _by_reason(self.unneeded))
        return "\n".join(parts) + "\n", refusals


def refused(text: str) -> tuple[str, ...]:
    """Returns the sentences with which slimx refuses the configuration `text`; none if it is accepted."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(text)
        try:
            load_config(file)
        except SlimxError as error:
            problems = error.problems if isinstance(error, Refusal) and error.problems else (error,)
            return tuple(str(problem).replace(f"{file}: ", "") for problem in problems)
    return ()


def _nested(settings: Mapping[str, object]) -> Json:
    tree: Json = {}
    for key in sorted(settings, key=_place):
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = settings[key]
    return tree


def _place(key: str) -> tuple[int, str]:
    """Returns what sorts `key` into the order of slimx's configuration; lists come in the order of their indices."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    known = known_keys(Config)
    indices = "".join(f"{part:>4}" for part in key.split(".") if part.isdigit())
    while parts and ".".join(parts) not in known:
        parts.pop()
    name = ".".join(parts)
    return (known.index(name) if name in known else len(known)), indices


def _listed(value: object) -> Json:
    """Returns `value` with every mapping from indices to entries replaced by the list of the entries."""
    if not isinstance(value, dict):
        return value  # type: ignore[return-value]
    inner = {key: _listed(part) for key, part in value.items()}
    if inner and all(key.isdigit() for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]  # type: ignore[return-value]
    return inner


def _lines(
    value: object, path: tuple[str, ...], sources: Mapping[str, str], supply: Mapping[str, str]
) -> Iterator[str]:
    """Yields the lines of YAML of `value` at `path`, each leaf with its source as a comment."""
    indent = "  " * len(path)
    entries: list[tuple[str, str, object]] = []
    if isinstance(value, list):
        entries = [(str(index), "-", entry) for index, entry in enumerate(value)]
    elif isinstance(value, dict):
        entries = [(str(key), f"{key}:", entry) for key, entry in value.items()]
    for key, label, entry in entries:
        inner = (*path, key)
        dotted = ".".join(inner)
        below = any(name.startswith(f"{dotted}.") for name in sources)
        if below:
            lines = list(_lines(entry, inner, sources, supply))
            if label == "-":
                lines[0] = f"{indent}- {lines[0].lstrip()}"
                yield from lines
            else:
                yield f"{indent}{label}"
                yield from lines
            continue
        comment = f"  # {sources[dotted]}" if sources.get(dotted) else ""
        if dotted in supply:
            comment += f"{';' if comment else '  #'} supply: {supply[dotted]}"
        yield f"{indent}{label} {_flow(entry)}{comment}"


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(title: str, entries: Mapping[str, str]) -> list[str]:
    """Returns the lines of a comment that lists `entries`; none if there are none."""
    if not entries:
        return []
    lines = [f"# {title}:"]
    for name, text in entries.items():
        lines += textwrap.wrap(
            f"{name}: {text}",
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
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"
