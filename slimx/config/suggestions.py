"""Suggestions for unknown keys and flags: the key that was meant, as an override or as a line of the file."""

from __future__ import annotations

import difflib
import functools
import json
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from slimx.config.foreign import FLAGS, PATHS
from slimx.config.section import shortened

LONG = 60
"""Characters of a value that a suggestion repeats, at most."""


def for_key(model: type[BaseModel], path: Sequence[str | int], value: Any, *, override: bool) -> str:
    """A suggestion for the unknown key at `path`, with `value`, of configurations that `model` describes. `override`:
    it stood on the command line, else in the file."""
    *section, last = map(str, path)
    siblings = _keys_at(model, path[:-1])
    if (told := PATHS.get(".".join([*section, last]))) is not None:
        return _translated(told, value, override=override)
    if near := difflib.get_close_matches(last, siblings, n=1, cutoff=0.8):
        return f"did you mean {'.'.join([*section, near[0]])}?"
    if (elsewhere := _same_name(model, section[:1], last)) is not None:
        return _written(elsewhere, value, override=override)
    if (told := FLAGS.get(last)) is not None:
        return _translated(told, value, override=override)
    if near := difflib.get_close_matches(last, siblings, n=1, cutoff=0.5):
        return f"did you mean {'.'.join([*section, near[0]])}?"
    return f"known keys: {', '.join(siblings)}"


def of_section(path: Sequence[str | int], value: Any) -> list[tuple[tuple[str | int, ...], Any]]:
    """Paths in an unknown section that are another framework's keys, with their values."""
    if not isinstance(value, dict):
        return [(tuple(path), value)] if ".".join(map(str, path)) in PATHS else []
    return [found for key, inner in value.items() for found in of_section((*path, str(key)), inner)]


def for_flag(model: type[BaseModel], flag: str, value: str) -> str | None:
    """A suggestion for `flag`, such as --lr, which is another framework's or a key behind dashes; None: it is neither.
    Flags that are called as a key is are Megatron-LM's."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in known_keys(model):
        return _written(name, value, override=True)
    if (told := FLAGS.get(name)) is not None:
        return _translated(told, value, override=True)
    key = _same_name(model, ["trainer"], name)
    return None if key is None else _written(key, value, override=True)


@functools.cache
def known_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """All keys that a configuration can have, dotted, `*` for an entry of a list."""
    return tuple(_walk(model))


def _same_name(model: type[BaseModel], section: list[str], last: str) -> str | None:
    """The key of this name in another section, this one's parts first; None where several are as near."""
    found = [key for key in known_keys(model) if key.rpartition(".")[2] == last]
    near = [key for key in found if key.split(".")[:1] == section] or found
    return near[0] if len(near) == 1 else None


def _walk(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        if not inner:
            yield name
        for part, listed in inner:
            yield from (f"{name}{'.*' * listed}.{key}" for key in _walk(part))


def _models(annotation: Any, listed: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Sections in an annotation, each with True if it is an entry of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, listed
        return
    listed = listed or typing.get_origin(annotation) in (tuple, list, dict)
    for argument in typing.get_args(annotation):
        yield from _models(argument, listed)


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The keys of the section at a location such as ("rollout", "engines", 0)."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = next((inner for inner, _ in _models(model.model_fields[part].annotation)), model)
    return sorted(model.model_fields)


def _translated(told: str, value: Any, *, override: bool) -> str:
    """The sentence for a value of the tables: a key, or a key and a note about its value."""
    key, _, note = told.partition(" ")
    return f"slimx calls it {key.replace('.*', '[]')}: {note}" if note else _written(key, value, override=override)


def _written(key: str, value: Any, *, override: bool) -> str:
    """`key` with `value`, as an override or as a line of YAML."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = shortened(value) if len(text) > LONG else text
    if not override:
        return f"write `{_nested(key.split('.'), text)[1:-1]}`"
    whole, _, entry = key.partition(".*.")
    return f"write '{whole}=[{_nested(entry.split('.'), text)}]'" if entry else f"write {key}={text}"


def _nested(path: list[str], text: str) -> str:
    """A value at a path as one line of YAML."""
    if not path:
        return text
    inner = _nested(path[1:], text)
    return f"[{inner}]" if path[0] == "*" else f"{{{path[0]}: {inner}}}"
