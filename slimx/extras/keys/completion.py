"""Completion of overrides in a shell, an entry point of `slimx.completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import shorten

import typer
from rich.markup import escape

from slimx.extras.keys.catalog import Key, all_keys
from slimx.extras.keys.show import first_sentence

type Completions = list[tuple[str, str]]


def complete(ctx: typer.Context, incomplete: str) -> Completions:
    """Returns the completions of the override `incomplete`, each with the first sentence of the key's description.

    While several keys match, they are completed as far as they are equal. A single key is completed with `=`, and then
    with its choices, or its default or type, so that a shell appends no space. bash passes the part after `=` alone;
    the key is then the last of the words before it."""
    words = [*(ctx.params.get("overrides") or ())]
    while words and words[-1] == "=":  # bash breaks words at =
        words.pop()
        if words:
            return _values(words[-1], whole=False)
    if words and not incomplete and _known(words[-1]) is not None:
        return _values(words[-1], whole=False)
    name, equals, _ = incomplete.partition("=")
    if equals:
        return _values(name, whole=True)
    found = [(key, path) for key, path in _written() if path.startswith(incomplete)]
    if len(found) == 1:
        return _values(found[0][1], whole=True)
    return [(f"{path}=", _described(key)) for key, path in found]


def _written() -> Iterator[tuple[Key, str]]:
    """Yields all keys, each with the dotted key to write: the first entry of a list stands for all entries."""
    for path, key in all_keys().items():
        yield key, path.replace(".*", ".0") if not path.startswith("policies") else path.replace(".*", ".NAME", 1)


def _known(name: str) -> Key | None:
    return next((key for key, path in _written() if path == name), None)


def _described(key: Key) -> str:
    """Returns the first sentence of a key's description on one line, which Typer breaks after 80 columns otherwise."""
    return escape(shorten(first_sentence(key.text), 79, placeholder="..."))


def _values(name: str, *, whole: bool) -> Completions:
    """Returns the values that the key `name` may have; with the key and `=` in front if `whole`."""
    key = _known(name.removesuffix("+"))
    if key is None:
        return []
    values: Sequence[str] = key.choices
    if not values:
        plain = key.default.strip("`")
        values = ("", key.type.upper().split()[0] if plain in ("required", "empty", "null") else plain)
    front = f"{name}=" if whole else ""
    return [(front + value, _described(key)) for value in values if front + value]
