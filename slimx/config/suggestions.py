"""Suggestions for unknown keys and flags: the key that the user probably meant, written as an override or as a line of
YAML."""

from __future__ import annotations

import difflib
import functools
import json
import re
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from slimx.config.foreign_names import Counterpart, of_flag, of_key
from slimx.config.section import ECHOED, echoed

SPECIAL = frozenset(" \t{}[]()<>'\"$&;|*?!#\\`~")
"""Characters that require an argument to be quoted in a shell."""
OFF = ("false", "null", "none", "0", "no")
REPEATING = ("critic", "policies")
"""Sections that repeat keys of other sections; suggestions name the key in the original section."""


def for_key(model: type[BaseModel], path: Sequence[str | int], value: object, *, override: bool) -> str:
    """Returns a suggestion for the unknown key at `path`, which the user set to `value`, in a configuration of type
    `model`. `override`: True if the key was set on the command line, False if it is in the file."""
    *section, last = map(str, path)
    siblings = _keys_at(model, path[:-1])
    text = _text(value)
    counterpart = of_key(".".join([*section, last]), text)
    if counterpart is not None:
        return _answer(model, counterpart, value=text, override=override)
    close = _same(last, siblings) or difflib.get_close_matches(last, siblings, 1, 0.8)
    if close:
        return f"did you mean {'.'.join([*section, close[0]])}?"
    near = _ending(model, path)
    if isinstance(value, dict):
        near = [key for key in near if _is_mapping(model, key)]
    if section:
        within = [key for key in near if key.startswith(f"{section[0]}.")]
        if within:
            return _keys(model, within, text, override=override, path=path)
    counterpart = of_flag(last, text)
    if counterpart is not None:
        return _answer(model, counterpart, value=text, override=override)
    close = difflib.get_close_matches(last, _prefixes(last, siblings), 1, 0)
    if near and not close:
        return _keys(model, near, text, override=override, path=path)
    close = close or difflib.get_close_matches(last, siblings, n=1, cutoff=0.5 if section else 0.7)
    if close:
        return f"did you mean {'.'.join([*section, close[0]])}?"
    return f"known keys: {', '.join(siblings)}"


def _same(name: str, keys: Sequence[str]) -> list[str]:
    """Returns a list with the entry of `keys` that equals `name` except for case and dashes; [] if there is none."""
    return [key for key in keys if _plain(key) == _plain(name)][-1:]


def _prefixes(name: str, keys: Sequence[str]) -> list[str]:
    """Returns the entries of `keys` that start with `name` or are a prefix of it. Names of one or two characters never
    match."""
    if len(name) <= 2:
        return []
    matching = []
    for key in keys:
        if len(key) > 2 and (key.startswith(name) or name.startswith(key)):
            matching.append(key)
    return matching


def of_section(
    model: type[BaseModel], path: Sequence[str | int], value: object
) -> list[tuple[tuple[str | int, ...], object]]:
    """Returns (path, value) for every key below the unknown section at `path`, if at least one of these keys is a key
    of another framework or matches the last parts of a key of slimx; otherwise []."""
    keys = list(_leaves(tuple(path), value))
    for key, _ in keys:
        if of_key(".".join(map(str, key)), "") is not None or _ending(model, key, full=True):
            return keys
    return []


def for_flag(model: type[BaseModel], flag: str, value: str) -> str | None:
    """Returns a suggestion for the command-line flag `flag`, such as --lr, with the value `value`; None if it is
    neither a flag of another framework nor similar to a key of slimx."""
    name = _plain(flag.lstrip("-"))
    if name in known_keys(model):
        return _written(name, _switch(model, name, value), override=True)
    counterpart = of_flag(name, value) or of_key(name, value)
    if counterpart is not None:
        return _answer(model, counterpart, value=value, override=True)
    near = _ending(model, name.split("."))
    return _keys(model, near, value, override=True) if near else None


def for_entry(model: type[BaseModel], path: Sequence[str], override: Mapping[str, object], count: int) -> str:
    """Returns a suggestion for `override`, a mapping whose keys are not all indices, of the list at `path`, which has
    `count` entries."""
    inside, value = next(_leaves((), override))
    key = ".".join(path)
    known = ".".join([key, "*", *map(str, inside)])
    if known in known_keys(model) and len(override) == 1:
        return _written(known, _text(value), override=True)
    return f"{key} is a list of length {count}; write {key}.N, with N counted from 0"


def listed(model: type[BaseModel], path: Sequence[str], value: object) -> str:
    """Returns the text of a list for the key at `path` whose only entry is `value`. In a list of mappings, the entry is
    a mapping from the first key that can be an integer to `value`, or to 1 if `value` is no integer."""
    field = field_at(model, path)
    for section, _ in _models(field.annotation) if field and not isinstance(value, dict) else ():
        number = value if type(value) is int else 1
        for name in section.model_fields:
            with suppress(ValidationError):
                section.model_validate({name: number}, strict=True)
                return f"[{{{name}: {number}}}]"
        return "[{KEY: VALUE}]"
    return f"[{echoed(_text(value))}]"


def field_at(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    """Returns the field of `model` that the key at `path` sets, ignoring list indices and names of policies in the
    path; None if there is no such key."""
    *section, last = [part for part in path if not part.isdigit()] or [""]
    if section[:1] == ["policies"]:
        del section[1:2]
    models = [model]
    for part in section:
        inner: list[type[BaseModel]] = []
        for outer in models:
            if part in outer.model_fields:
                for section_model, _ in _models(outer.model_fields[part].annotation):
                    inner.append(section_model)
        models = inner
    for section_model in models:
        if last in section_model.model_fields:
            return section_model.model_fields[last]
    return None


def default_list(model: type[BaseModel], path: Sequence[str]) -> list[object] | None:
    """Returns the default entries of the list at `path`, as plain values; None if the key is not a list."""
    field = field_at(model, path)
    if field is None or not _is_list(field.annotation):
        return None
    default = field.get_default(call_default_factory=True)
    if not isinstance(default, tuple | list):
        return []
    entries = []
    for entry in default:
        entries.append(entry.model_dump(exclude_unset=True) if isinstance(entry, BaseModel) else entry)
    return entries


def resets(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Returns True if setting the key at `path` to null restores its default, as for sections and mappings that cannot
    be null."""
    field = field_at(model, path)
    if field is None or type(None) in typing.get_args(field.annotation):
        return False
    return typing.get_origin(field.annotation) is dict or any(not listed for _, listed in _models(field.annotation))


def is_list(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Returns True if the key at `path` is a list that cannot be null; False for an entry of a list."""
    field = field_at(model, path)
    if field is None or path[-1].isdigit() or type(None) in typing.get_args(field.annotation):
        return False
    return _is_list(field.annotation)


@functools.cache
def known_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns all dotted keys of the configuration type `model`, with `*` for an entry of a list."""
    return tuple(key for key, _ in _walk(model))


@functools.cache
def _switches(model: type[BaseModel]) -> frozenset[str]:
    """Returns the dotted keys of all boolean fields of `model`."""
    return frozenset(key for key, annotation in _walk(model) if annotation in (bool, bool | None))


def _ending(model: type[BaseModel], path: Sequence[str | int], *, full: bool = False) -> list[str]:
    """Returns the least nested keys of `model` among those that end with all parts of `path`. If there are none and
    `full` is False, returns the least nested keys with the same last part as `path`, preferably those at most one
    section deeper."""
    parts = [_plain(str(part)) for part in path if not str(part).isdigit()]
    keys = [key.split(".") for key in known_keys(model)]
    near = [key for key in keys if _names(key)[-len(parts) :] == parts]
    if not near and not full:
        near = [key for key in keys if key[-1] == parts[-1]]
        # One section deeper (trainer.optimizer.lr for trainer.lr), not two (trainer.optimizer.muon.steps).
        below = []
        for key in near:
            if key[0] == parts[0] and len(_names(key)) <= len(parts) + 1:
                below.append(key)
        near = below or near
    if parts and parts[0] not in REPEATING:
        near = [key for key in near if key[0] not in REPEATING] or near
    by_depth: dict[int, list[str]] = defaultdict(list)
    for key in near:
        by_depth[len(_names(key))].append(".".join(key))
    return by_depth[min(by_depth)] if by_depth else []


def _names(key: Sequence[str]) -> list[str]:
    """Returns those parts of a dotted key that are not `*`."""
    return [part for part in key if part != "*"]


def _keys(
    model: type[BaseModel], keys: Sequence[str], text: str, *, override: bool, path: Sequence[str | int] = ()
) -> str:
    """Returns the sentence that suggests `keys`; a single key is written with the value `text` and with the list
    indices from `path`."""
    if len(keys) > 1:
        return f"did you mean {', '.join(keys[:-1][:3])} or {keys[-1]}?"
    (key,) = keys
    for part in path:
        if str(part).isdigit():
            key = key.replace("*", str(part), 1)
    return _written(key, _switch(model, key, text), override=override)


def _walk(model: type[BaseModel]) -> Iterator[tuple[str, object]]:
    """Yields every dotted key of `model`, with `*` for an entry of a list, and its type annotation."""
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        if len(inner) != 1:  # no section, or an objective, which can also be given as the name of its kind
            yield name, field.annotation
        for part, listed in inner:
            prefix = f"{name}.*" if listed else name
            for key, annotation in _walk(part):
                yield f"{prefix}.{key}", annotation


def _models(annotation: object, listed: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yields every section class in `annotation`, each with a flag that is True if the section is an entry of a list or
    mapping. `listed`: True if `annotation` itself is the type of such an entry."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, listed
        return
    listed = listed or typing.get_origin(annotation) in (tuple, list, dict)
    for argument in typing.get_args(annotation):
        yield from _models(argument, listed)


def _is_list(annotation: object) -> bool:
    origin = typing.get_origin(annotation)
    return origin in (tuple, list) or (origin is not dict and any(map(_is_list, typing.get_args(annotation))))


def _is_mapping(model: type[BaseModel], key: str) -> bool:
    field = field_at(model, key.split("."))
    if field is None:
        return False
    parts = (field.annotation, *typing.get_args(field.annotation))
    return any(typing.get_origin(part) is dict for part in parts)


def _leaves(path: tuple[str | int, ...], value: object) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yields the path and the value of every leaf below `path`, including leaves in lists of mappings."""
    inner: Mapping[object, object] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        inner = dict(enumerate(value))
    if not inner:
        yield path, value
    for key, part in inner.items():
        yield from _leaves((*path, str(key)), part)


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Returns the sorted keys of the section at `location`, such as ("rollout", "engines", 0)."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            inner = list(_models(model.model_fields[part].annotation))
            if inner:
                model, _ = inner[0]
    return sorted(model.model_fields)


def _answer(model: type[BaseModel], counterpart: Counterpart, *, value: str, override: bool) -> str:
    """Returns the sentence that explains `counterpart`, the slimx equivalent of a foreign name that the user set to
    `value`. `override`: True to suggest overrides, False for lines of YAML."""
    is_flag = counterpart.closed and {*counterpart.values} == {"true"}
    if is_flag or (counterpart.sets and value.lower() in ("true", *OFF)):
        if value.lower() in OFF:
            return (
                f"not needed: the feature is off unless {counterpart.key or ' and '.join(counterpart.sets)} turns it on"
            )
        value = "true"  # a flag takes no value, so the next argument is unrelated
    if counterpart.sets:
        values = {key: text.replace("VALUE", value) for key, text in counterpart.sets.items()}
        return _several(values, override=override)
    translated = counterpart.translate(value if counterpart.values else _switch(model, counterpart.key, value))
    if translated is not None and not isinstance(translated, str):
        return _answer(model, translated, value=value, override=override)
    key = counterpart.key.replace(".*", "[]")
    if counterpart.note and key:
        return f"the key of slimx is {key}: {counterpart.note}"
    if counterpart.note:
        return f"{'not needed' if counterpart.not_needed else 'no counterpart'}: {counterpart.note}"
    if translated is None:
        return f"the key of slimx is {key}: {_renamed(counterpart)}"
    return _written(counterpart.key, translated, override=override)


def _renamed(counterpart: Counterpart) -> str:
    """Returns text that lists the foreign values of `counterpart` that slimx renames, each with its translation, or all
    foreign values if none is renamed."""
    names = []
    for foreign, translated in counterpart.values.items():
        if isinstance(translated, str) and translated != foreign:
            names.append(f"{foreign} is {translated}")
    return ", ".join(names or counterpart.values)


def _switch(model: type[BaseModel], key: str, value: str) -> str:
    """Returns `value`, or "true" if `key` is boolean and `value` is not a boolean."""
    return "true" if key in _switches(model) and value.lower() not in ("true", *OFF) else value


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _several(values: Mapping[str, str], *, override: bool) -> str:
    parts = []
    for key, text in values.items():
        parts.append(_written(key, text, override=override).removeprefix("write "))
    return f"write {' '.join(parts) if override else ' and '.join(parts)}"


def _written(key: str, text: str, *, override: bool) -> str:
    """Returns the instruction to set `key` to `text`, as an override or as a line of YAML."""
    if len(text) > ECHOED:
        return f"write {key.replace('.*', '.0')} with the same value"
    if not override:
        return f"write `{_nested(re.sub('[.][0-9]+(?=[.]|$)', '.*', key).split('.'), text)[1:-1]}`"
    written = f"{key.replace('.*', '.0')}={text}"
    return f"write '{written}'" if SPECIAL & {*written} and "'" not in written else f"write {written}"


def _nested(path: list[str], text: str) -> str:
    """Returns YAML, on one line, that sets the nested keys `path` to the value `text`."""
    if not path:
        return text
    inner = _nested(path[1:], text)
    return f"[{inner}]" if path[0] == "*" else f"{{{path[0]}: {inner}}}"
