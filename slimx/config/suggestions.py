"""Suggestions for unknown keys and flags: the key that was meant, as an override or as a line of the file."""

from __future__ import annotations

import difflib
import functools
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slimx.config.foreign_names import Meaning, of_flag, of_key
from slimx.config.section import ECHOED

SPECIAL = frozenset(" \t{}[]()<>'\"$&;|*?!#\\`~")
"""Characters for which a shell needs quotes."""
OFF = ("false", "null", "none", "0", "no")
SECOND = ("critic", "policies")
"""Sections that repeat keys of others, which are meant first."""


def for_key(model: type[BaseModel], path: Sequence[str | int], value: Any, *, override: bool) -> str:
    """A suggestion for the unknown key at `path`, with `value`, of configurations that `model` describes. `override`:
    it stood on the command line, else in the file."""
    *section, last = map(str, path)
    written, siblings, text = ".".join([*section, last]), _keys_at(model, path[:-1]), _text(value)
    answer = functools.partial(_answer, model, value=text, override=override)
    if (found := of_key(written, text)) is not None:
        return answer(found)
    plain = {_plain(key): key for key in siblings}
    close = [plain[_plain(last)]] if _plain(last) in plain else difflib.get_close_matches(last, siblings, 1, 0.8)
    if close:
        return f"did you mean {'.'.join([*section, close[0]])}?"
    near = [key for key in _ending(model, path) if not isinstance(value, dict) or _is_mapping(model, key)]
    if within := [key for key in near if section and key.startswith(f"{section[0]}.")]:
        return _keys(model, within, text, override=override, path=path)
    if (found := of_flag(last, text)) is not None:
        return answer(found)
    alike = [key for key in siblings if min(len(key), len(last)) > 2 and (key.startswith(last) or last.startswith(key))]
    close = difflib.get_close_matches(last, alike, 1, 0)
    if near and not close:
        return _keys(model, near, text, override=override, path=path)
    if close := close or difflib.get_close_matches(last, siblings, n=1, cutoff=0.5 if section else 0.7):
        return f"did you mean {'.'.join([*section, close[0]])}?"
    return f"known keys: {', '.join(siblings)}"


def of_section(
    model: type[BaseModel], path: Sequence[str | int], value: Any
) -> list[tuple[tuple[str | int, ...], Any]]:
    """All keys in an unknown section, with their values, if one of them is another framework's or ends as one of
    slimx's does; else nothing."""
    keys = list(_leaves(tuple(path), value))
    known = any(of_key(".".join(map(str, key)), "") is not None or _ending(model, key, whole=True) for key, _ in keys)
    return keys if known else []


def for_flag(model: type[BaseModel], flag: str, value: str) -> str | None:
    """A suggestion for `flag`, such as --lr, which is another framework's or a key behind dashes; None for others."""
    name = _plain(flag.lstrip("-"))
    if name in known_keys(model):
        return _written(name, _switch(model, name, value), override=True)
    if (found := of_flag(name, value) or of_key(name, value)) is not None:
        return _answer(model, found, value=value, override=True)
    near = _ending(model, name.split("."))
    return _keys(model, near, value, override=True) if near else None


def for_entry(model: type[BaseModel], path: Sequence[str], value: Any) -> str:
    """A suggestion for an override that has a mapping where the configuration has a list, or the other way round."""
    key, text = ".".join(path), _text(value)
    if near := [each for each in known_keys(model) if each.replace(".*", "") == key and "*" in each]:
        return _written(near[0], text, override=True)
    if (field := field_at(model, path)) is None or not _is_list(field.annotation):
        return f"{key} is a section; set one of its keys, as {key}.KEY=VALUE"
    entries = f"[{text}]" if len(text) <= ECHOED else "[...]"
    return f"{key} is a list; write '{key}={entries}', or {key}.0.KEY=VALUE for its first entry"


def field_at(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    """The field of the key at `path`, whose digits are places in lists; None: there is none."""
    *section, last = [part for part in path if not part.isdigit()] or [""]
    models = [model]
    for part in section:
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        models = [inner for field in fields for inner, _ in _models(field.annotation)]
    return next((each.model_fields[last] for each in models if last in each.model_fields), None)


def default_list(model: type[BaseModel], path: Sequence[str]) -> list[Any] | None:
    """Plain entries of the list that the key at `path` is where nothing is set; None: it is no list."""
    field = field_at(model, path)
    if field is None or not _is_list(field.annotation):
        return None
    default = field.get_default(call_default_factory=True)
    entries = default if isinstance(default, tuple | list) else ()
    return [each.model_dump(exclude_unset=True) if isinstance(each, BaseModel) else each for each in entries]


def resets(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Returns True if null at `path` stands for the default, as it does for sections and mappings that cannot be
    null."""
    field = field_at(model, path)
    if field is None or type(None) in typing.get_args(field.annotation):
        return False
    return typing.get_origin(field.annotation) is dict or any(not listed for _, listed in _models(field.annotation))


def is_list(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Returns True if `path` is that of a list, not of an entry, which cannot be null."""
    field = field_at(model, path)
    if field is None or path[-1].isdigit() or type(None) in typing.get_args(field.annotation):
        return False
    return _is_list(field.annotation)


@functools.cache
def known_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """All keys that a configuration can have, dotted, `*` for an entry of a list."""
    return tuple(key for key, _ in _walk(model))


@functools.cache
def _switches(model: type[BaseModel]) -> frozenset[str]:
    """Keys that are true or false."""
    return frozenset(key for key, annotation in _walk(model) if annotation in (bool, bool | None))


def _ending(model: type[BaseModel], path: Sequence[str | int], *, whole: bool = False) -> list[str]:
    """The keys that end as `path` does, the least nested of them; those of a nested section where the path begins with
    one above it. `whole`: all of `path` has to be at their end."""
    parts = [_plain(str(part)) for part in path if not str(part).isdigit()]
    keys = {key: key.replace(".*", "").split(".") for key in known_keys(model)}
    found = {key: names for key, names in keys.items() if names[-len(parts) :] == parts}
    if not found and not whole:
        found = {key: names for key, names in keys.items() if names[-1] == parts[-1]}
        # One level down, as trainer.lr for trainer.optimizer.lr, but not two, as trainer.steps for those of Muon.
        inside = [key for key, names in found.items() if names[0] == parts[0] and len(names) <= len(parts) + 1]
        found = {key: found[key] for key in inside} or found
    if parts and parts[0] not in SECOND:
        found = {key: names for key, names in found.items() if names[0] not in SECOND} or found
    return [key for key, names in found.items() if len(names) == min(map(len, found.values()))]


def _keys(
    model: type[BaseModel], keys: Sequence[str], text: str, *, override: bool, path: Sequence[str | int] = ()
) -> str:
    """The sentence for a few keys, one of which is meant; indices of lists are those in `path`."""
    if len(keys) > 1:
        return f"did you mean {', '.join(keys[:-1][:3])} or {keys[-1]}?"
    (key,) = keys
    for part in path:
        if str(part).isdigit():
            key = key.replace("*", str(part), 1)
    return _written(key, _switch(model, key, text), override=override)


def _walk(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        if len(inner) != 1:  # none, or an objective, whose kind can stand alone
            yield name, field.annotation
        for part, listed in inner:
            yield from ((f"{name}{'.*' * listed}.{key}", annotation) for key, annotation in _walk(part))


def _models(annotation: Any, listed: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Sections in an annotation, each with True if it is an entry of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, listed
        return
    listed = listed or typing.get_origin(annotation) in (tuple, list, dict)
    for argument in typing.get_args(annotation):
        yield from _models(argument, listed)


def _is_list(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return origin in (tuple, list) or (origin is not dict and any(map(_is_list, typing.get_args(annotation))))


def _is_mapping(model: type[BaseModel], key: str) -> bool:
    field = field_at(model, key.split("."))
    return field is not None and any(
        typing.get_origin(part) is dict for part in (field.annotation, *typing.get_args(field.annotation))
    )


def _leaves(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Keys under `path`, with their values; entries of lists of mappings count."""
    inner: Mapping[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        inner = dict(enumerate(value))
    if not inner:
        yield path, value
    for key, part in inner.items():
        yield from _leaves((*path, str(key)), part)


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The keys of the section at a location such as ("rollout", "engines", 0)."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = next((inner for inner, _ in _models(model.model_fields[part].annotation)), model)
    return sorted(model.model_fields)


def _answer(model: type[BaseModel], found: Meaning, *, value: str, override: bool) -> str:
    """The sentence for a meaning of the tables with the foreign `value`."""
    if found.closed and {*found.values} == {"true"} or found.sets and value.lower() in ("true", *OFF):
        if value.lower() in OFF:
            return f"not needed: it is off unless {found.key or ' and '.join(found.sets)} turns it on"
        value = "true"  # a flag takes no value: what follows it is another argument
    if found.sets:
        return _several({key: text.replace("VALUE", value) for key, text in found.sets.items()}, override=override)
    here = found.of(value if found.values else _switch(model, found.key, value))
    if here is not None and not isinstance(here, str):
        return _answer(model, here, value=value, override=override)
    key = found.key.replace(".*", "[]")
    if found.note and key:
        return f"slimx calls it {key}: {found.note}"
    if found.note:
        return f"{'not needed' if found.needless else 'no counterpart'}: {found.note}"
    if here is None:
        names = [
            f"{there} is {mine}" for there, mine in found.values.items() if isinstance(mine, str) and there != mine
        ]
        return f"slimx calls it {key}: {', '.join(names) or ', '.join(found.values)}"
    return _written(found.key, here, override=override)


def _switch(model: type[BaseModel], key: str, value: str) -> str:
    """`value`, or true where the key is a switch and what follows its flag is no value of one."""
    return "true" if key in _switches(model) and value.lower() not in ("true", *OFF) else value


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _several(values: Mapping[str, str], *, override: bool) -> str:
    parts = [_written(key, text, override=override).removeprefix("write ") for key, text in values.items()]
    return f"write {' '.join(parts) if override else ' and '.join(parts)}"


def _written(key: str, text: str, *, override: bool) -> str:
    """`key` with the value `text`, as an override or as a line of YAML."""
    if len(text) > ECHOED:
        return f"write {key.replace('.*', '.0')} with the same value"
    if not override:
        return f"write `{_nested(re.sub('[.][0-9]+(?=[.]|$)', '.*', key).split('.'), text)[1:-1]}`"
    written = f"{key.replace('.*', '.0')}={text}"
    return f"write '{written}'" if SPECIAL & {*written} and "'" not in written else f"write {written}"


def _nested(path: list[str], text: str) -> str:
    """A value at a path as one line of YAML."""
    if not path:
        return text
    inner = _nested(path[1:], text)
    return f"[{inner}]" if path[0] == "*" else f"{{{path[0]}: {inner}}}"
