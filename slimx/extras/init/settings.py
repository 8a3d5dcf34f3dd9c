"""Settings of a run with their comments, and the YAML file made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slimx.extras.foreign.commented_yaml import lines_of, tree_of
from slimx.extras.keys.catalog import all_keys
from slimx.extras.keys.pages import pages_of, purpose_of
from slimx.extras.keys.show import first_sentence

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


def values_of(settings: Iterable[Setting]) -> dict[str, object]:
    """Returns the values by dotted key."""
    return {setting.key: setting.value for setting in settings}


def file_of(settings: Iterable[Setting], title: str) -> str:
    """Returns the YAML file: the comment `title`, and the settings by section, each line with a comment."""
    settings = list(settings)
    comments = {}
    for setting in settings:
        section, *inner = setting.key.split(".")
        comments[section] = f"{purpose_of(section)}: {pages_of(section)[-1]}"
        for length in range(1, len(inner)):
            above = ".".join((section, *inner[:length]))
            comments[above] = f"slimx keys {above}"
        comments[setting.key] = setting.comment or _described(setting.key)
    lines = [f"# {line}".rstrip() for line in title.splitlines()]
    for section, values in tree_of(values_of(settings)).items():
        lines += ["", *lines_of({section: values}, comments, COLUMN)]
    return "\n".join(lines) + "\n"


def _described(key: str) -> str:
    known = all_keys().get(key)
    text = first_sentence(known.text) if known else ""
    return text if len(text) <= SHORTEST else f"slimx keys {key}"
