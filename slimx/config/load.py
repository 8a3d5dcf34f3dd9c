"""Loads a `Config` from a YAML file, a mapping or another `Config` and from overrides, and turns every error into a
message of one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from slimx.config import suggestions, wording
from slimx.config.foreign_names import to_known_names
from slimx.config.rule import Refusal, refuse
from slimx.config.schema import Config
from slimx.config.section import echoed
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.objectives import OBJECTIVES, merged_objective
from slimx.errors import SlimxError, safe_repr
from slimx.json_types import Json

Overrides = str | Sequence[str] | Mapping[str, object]
"""Overrides of a configuration: `section.key=value`, several of them, or a mapping of nested or dotted keys."""


def load_config(source: str | Path | Mapping[str, object] | Config, overrides: Overrides = ()) -> Config:
    """Reads `source`, applies `overrides` in order, and returns the validated configuration.

    `source`: a YAML file, a mapping of nested or dotted keys, or a configuration, which is not changed. Raises a
    SlimxError that names the file or override and the key; for an unknown key it suggests the nearest known one."""
    path = Path("configuration")
    tree = _config({})
    try:
        if isinstance(source, Config):
            tree = _config(set_values(source))
        elif isinstance(source, Mapping):
            for text in _texts(source):
                tree, _ = _apply(tree, text, ())
        else:
            path = Path(source).expanduser()
            tree = _read(path)
        return _load(path, tree, _texts(overrides))
    except RecursionError:
        raise SlimxError(
            f"{path}: lists or mappings are nested too deeply; reduce the nesting in this file and in the overrides",
            code="config.depth",
            about=str(path),
        ) from None


def set_values(config: Config) -> Json:
    """Returns the values of `config` that are set, without those that the preset `algorithm.name` sets, so that another
    preset can replace them."""
    plain = config.to_plain(exclude_unset=True)
    if "algorithm" in plain:
        preset = Algorithm(name=config.algorithm.name).model_dump(mode="json")
        plain["algorithm"] = _beyond(plain["algorithm"], preset) | {"name": config.algorithm.name}
    return plain


def _beyond(values: Json, base: Json) -> Json:
    """Returns the entries of the nested mapping `values` that differ from `base`."""
    differing = {}
    for key, value in values.items():
        if value != base.get(key):
            nested = isinstance(value, dict) and isinstance(base.get(key), dict)
            differing[key] = _beyond(value, base[key]) if nested else value
    return differing


def _texts(overrides: Overrides) -> Sequence[str]:
    """Returns `overrides` as `section.key=value`."""
    if isinstance(overrides, str):
        return [overrides]
    for text in overrides:
        if not isinstance(text, str):
            raise SlimxError(
                f"{safe_repr(text)} is not a string; pass overrides such as 'schedule.steps=5', or one mapping whose "
                "keys are strings",
                code="config.override",
                about=type(text).__name__,
            )
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, ensure_ascii=False, default=_path)}" for key, value in overrides.items()]
    return overrides


def _path(value: object) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise SlimxError(
        f"the overrides contain {safe_repr(value)}, which YAML cannot contain; pass hooks to slimx.train by name",
        code="config.override",
        about=type(value).__name__,
    )


def _load(path: Path, tree: DictConfig, overrides: Sequence[str]) -> Config:
    applied: dict[str, str] = {}  # overrides by the dotted key that they set
    for index, override in enumerate(overrides):
        tree, key = _apply(tree, override, overrides[index + 1 : index + 3])
        applied[key] = override
    try:
        values = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        message = wording.no_interpolation(error, suggestions.known_keys(Config))
        if error.full_key:
            message = f"{error.full_key}: {message}"
        raise SlimxError(f"{path}: {message}", code="config.interpolation", about=str(path)) from None
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems: list[SlimxError] = []
        for item in error.errors():
            problems += _problems(item, applied)
        _refuse(problems, path, applied)
        raise
    config._interpolated = dict(_interpolations(_plain(tree)))
    return config


def _read(path: Path) -> DictConfig:
    """Reads the YAML file at `path` and replaces aliases of keys. Raises SlimxError if the file is missing, is not
    YAML, or is not a mapping of sections."""
    if not path.is_file():
        raise SlimxError(wording.no_file(path), code="config.no_file", about=str(path))
    try:
        tree = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:  # ValueError: too long an integer
        line, message = wording.not_yaml(error, path.read_text(errors="replace"))
        where = path if line is None else f"{path}, line {line}"
        raise SlimxError(f"{where}: {message}", code="config.not_yaml", about=str(path)) from None
    reason = wording.no_sections(path, tree, Config.model_fields)
    if reason is not None:
        raise SlimxError(f"{path}: {reason}", code="config.no_sections", about=str(path))
    return _named(tree, str(path))


def _apply(tree: DictConfig, override: str, following: Sequence[str]) -> tuple[DictConfig, str]:
    """Returns `tree` with `override` applied, and the dotted key that the override sets. `following`: the next
    command-line arguments, from which the error message suggests a correction. Raises SlimxError for an invalid
    override."""
    if "=" not in override or override.startswith("="):
        message = wording.no_override(override, following, suggestions.known_keys(Config))
        raise SlimxError(message, code="config.override", about=override)
    where = f"override {echoed(override)!r}"
    try:
        name, _, value = override.lstrip("+").partition("=")  # + marks a new key in Hydra
        key = name.removesuffix("+")
        added = OmegaConf.from_dotlist([f"{key}={value}"])
        if key != name:
            _append(added, key, _plain(tree), where)
        values = _plain(_named(added, where))
        return _merged(tree, values, where), _dotted(values)
    except YAMLError as error:
        message = f"{where}: {wording.not_yaml(error, override)[1]}"
        raise SlimxError(message, code="config.override", about=override) from None
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        message = f"{where} cannot be applied ({wording.not_applied(error)})"
        raise SlimxError(message, code="config.override", about=override) from None


def _append(added: DictConfig, key: str, base: Json, where: str) -> None:
    """Replaces the value of `added` at the dotted `key`, in place, by the list that `base` or the schema has there,
    with this value appended; a list is appended entry by entry. Raises SlimxError, naming `where`, if there is no
    list."""
    path = key.split(".")
    entries = _entries(_value_at(base, path), path)
    if entries is None:
        raise SlimxError(
            f"{where}: += appends to a list, which {key} is not; write {key}=VALUE", code="config.override", about=key
        )
    value = _value_at(_plain(added), path)
    OmegaConf.update(added, key, entries + (value if isinstance(value, list) else [value]), merge=False)


def _plain(tree: DictConfig | ListConfig) -> Json:
    """Returns `tree` as plain dicts and lists, with interpolations unresolved."""
    return cast(Json, OmegaConf.to_container(tree, resolve=False))


def _named(tree: DictConfig | ListConfig, where: str) -> DictConfig:
    """Returns `tree` with aliases of keys replaced by the schema's names. `where` names the file or override in
    errors."""
    values = _plain(tree)
    to_known_names(values, where)
    return _config(values)


def _config(values: object) -> DictConfig:
    return OmegaConf.create(cast(Json, values))


def _merged(tree: DictConfig, override: Json, where: str) -> DictConfig:
    """Returns `tree` with one override merged into it; the override may address single entries of lists by index, from
    0.

    `override`: the nested mapping that sets the override's key. null for a section or a mapping removes the keys that
    the file sets in it. null for a list makes the list empty, and {} makes a mapping empty. `where` names the override
    in errors."""
    path = _dotted(override).split(".")
    *above, last = path
    base = _plain(tree)
    value = _value_at(override, path)
    section = _value_at(base, above)
    if value is None and suggestions.resets(Config, path):
        if isinstance(section, dict):
            section.pop(last, None)
        return _config(base)
    if value == {} and isinstance(section, dict) and isinstance(section.get(last), dict):
        section[last] = {}
        return _config(base)
    if value is None and suggestions.is_list(Config, path):
        parent = _value_at(override, above)
        if isinstance(parent, dict):
            parent[last] = []
    _take_objectives(override, base)
    try:
        return cast(DictConfig, OmegaConf.merge(_config(base), _config(_listed(override, base, (), where))))
    except (OmegaConfBaseException, TypeError) as error:
        if "incompatible container types" not in str(error):
            raise
        key = ".".join(path)
        message = f"{where}: {key} is a section, not a list; set one of its keys with {key}.KEY=VALUE"
        raise SlimxError(message, code="config.override", about=key) from None


def _take_objectives(override: Json, base: Json) -> None:
    """Merges the loss and advantages settings of `override` into `base` by the rules of `merged_objective`, and removes
    them from `override`."""
    for key, inner in override.items():
        if not isinstance(inner, dict):
            continue
        if key == "algorithm":
            section = base.get(key) or {}
            base[key] = section
            for name in OBJECTIVES.keys() & inner.keys():
                section[name] = merged_objective(section.get(name), inner.pop(name))
        elif isinstance(base.get(key), dict):
            _take_objectives(inner, base[key])


def _listed(override: object, base: object, path: tuple[str, ...], where: str) -> object:
    """Returns `override` with every mapping from list indices to entries replaced by the complete list.

    Entries that the override does not set come from `base` or, if it has no list, from the schema's default. `path`:
    keys that lead to `override`. Raises SlimxError, naming `where`, for an index beyond the end of the list."""
    if not isinstance(override, dict):
        return override
    entries = _entries(base, path)
    if entries is None:
        values = {}
        for key, inner in override.items():
            values[key] = _listed(inner, _inner(base, key), (*path, str(key)), where)
        return values
    key = ".".join(path)
    if not "".join(map(str, override)).isdigit():
        message = f"{where}: {suggestions.for_entry(Config, path, override, len(entries))}"
        raise SlimxError(message, code="config.override", about=key)
    for index, inner in override.items():
        if int(index) > len(entries):
            raise SlimxError(
                f"{where}: {key}.{index} does not exist, because entries of lists are numbered from 0 without gaps"
                f"; write {key}.{len(entries)} to add an entry",
                code="config.entry",
                about=f"{key}.{index}",
            )
        if int(index) == len(entries):
            entries.append({})
        before = entries[int(index)]
        entry = _listed(inner, before, (*path, str(index)), where)
        if isinstance(before, dict) and isinstance(entry, dict):
            entry = OmegaConf.merge(before, entry)
        entries[int(index)] = entry
    return entries


def _entries(base: object, path: Sequence[str]) -> list[object] | None:
    """Returns a copy of the list whose entries are overridden: `base`, or the default at `path` if `base` is None.
    Returns None if the value at `path` is not a list."""
    if isinstance(base, list):
        return list(base)
    return suggestions.default_list(Config, path) if base is None else None


def _value_at(tree: object, path: Iterable[object]) -> object:
    """Returns the value at `path`, a sequence of keys and indices; None if it does not exist."""
    for key in path:
        tree = _inner(tree, key)
    return tree


def _inner(tree: object, key: object) -> object:
    """Returns the value of a mapping at `key`, or the entry of a list at the index `key`; None if it does not exist."""
    if isinstance(tree, list):
        index = str(key)
        return tree[int(index)] if index.isdigit() and int(index) < len(tree) else None
    return tree.get(key) if isinstance(tree, dict) else None


def _dotted(tree: Json) -> str:
    """Returns the dotted key that the nested mapping of one override sets."""
    ((key, inner),) = tree.items()
    return f"{key}.{_dotted(inner)}" if isinstance(inner, dict) and len(inner) == 1 else str(key)


def _interpolations(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yields the path and the text of every string in `value` that contains an interpolation, `${...}`. `path`: path of
    `value` itself."""
    if isinstance(value, str) and "${" in value:
        yield path, value
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _interpolations(part, (*path, key))
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from _interpolations(part, (*path, index))


def _problems(item: ErrorDetails, applied: Mapping[str, str]) -> Sequence[SlimxError]:
    """Converts `item`, a pydantic error record, to one or more errors. `applied`: overrides by the dotted key that they
    set."""
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Refusal):
        return cause.problems or (cause,)
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        keys = suggestions.of_section(Config, item["loc"], item["input"]) or [(item["loc"], item["input"])]
        return [_unknown(path, value, applied) for path, value in keys]
    if item["type"] == "missing":
        message = f"{where} is missing; set it in the file or with {where}=VALUE"
        return (SlimxError(message, code="config.missing_key", about=where),)
    return (SlimxError(wording.invalid_value(where, item, Config), code="config.value", about=where),)


def _unknown(path: Sequence[str | int], value: object, applied: Mapping[str, str]) -> SlimxError:
    key = ".".join(map(str, path))
    hint = suggestions.for_key(Config, path, value, override=_override_of(key, applied) is not None)
    return SlimxError(f"unknown key {echoed(key)}; {hint}", code="config.unknown_key", about=key)


def _override_of(key: str, applied: Mapping[str, str]) -> str | None:
    """Returns the text of the last override that set `key`, a section that contains `key`, or a value inside `key`;
    None if no override did. `applied`: overrides by the dotted key that they set."""
    for name in reversed(list(applied)):
        if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."):
            return applied[name]
    return None


def _refuse(problems: Sequence[SlimxError], path: Path, applied: Mapping[str, str]) -> None:
    """Raises one Refusal that lists `problems`, each attributed to the override that caused it or, if none did, to the
    file at `path`. Returns if there are none."""
    names = []
    for problem in problems:
        override = _override_of(problem.about, applied)
        names.append(str(path) if override is None else f"override {echoed(override)!r}")
    if len(set(names)) == 1:
        refuse(problems, f"{names[0]}: ")
    placed = []
    for name, problem in zip(names, problems, strict=True):
        placed.append(SlimxError(f"{name}: {problem}", code=problem.code, about=problem.about))
    refuse(placed)
