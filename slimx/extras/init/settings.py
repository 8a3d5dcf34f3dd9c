"""Settings of a run with their comments, and the YAML file made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from slimx.extras.keys.catalog import all_keys
from slimx.extras.keys.pages import pages_of, purpose_of
from slimx.extras.keys.show import first_sentence
from slimx.json_types import Json

COLUMN = 48
"""Column at which comments begin, if the line is not longer."""
SHORTEST = 100
"""Maximum number of characters of a comment that is taken from a key's description."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file."""

    key: str
    """Dotted key."""
    value: object
    comment: str = ""
    """Comment in a few words; "": the beginning of the key's description."""


def tree_of(settings: Iterable[Setting]) -> Json:
    """Returns the settings as nested mappings."""
    tree: Json = {}
    for setting in settings:
        *above, last = setting.key.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        section[last] = setting.value
    return tree


def file_of(settings: Iterable[Setting], title: str) -> str:
    """Returns the YAML file: the comment `title`, and the settings by section, each line with a comment."""
    settings = list(settings)
    comments = {setting.key: setting.comment or _described(setting.key) for setting in settings}
    lines = [f"# {line}".rstrip() for line in title.splitlines()]
    for section, values in tree_of(settings).items():
        pages = pages_of(section)
        lines += ["", _line(f"{section}:", f"{purpose_of(section)}: {pages[-1]}")]
        lines += _lines(values, section, "  ", comments)
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], path: str, indent: str, comments: Mapping[str, str]) -> Iterable[str]:
    for name, value in values.items():
        key = f"{path}.{name}"
        if key in comments:
            yield _line(f"{indent}{name}: {_flow(value)}", comments[key])
        else:
            yield _line(f"{indent}{name}:", f"slimx keys {key}")
            yield from _lines(value, key, f"{indent}  ", comments)


def _line(text: str, comment: str) -> str:
    return f"{text:<{COLUMN}}  # {comment}" if comment else text


def _flow(value: object) -> str:
    """Returns a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _described(key: str) -> str:
    known = all_keys().get(key)
    text = first_sentence(known.text) if known else ""
    return text if len(text) <= SHORTEST else f"slimx keys {key}"
