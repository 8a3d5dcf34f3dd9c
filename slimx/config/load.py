"""From a YAML file and dotted overrides to a checked `Config`; every refusal is one sentence."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from slimx.config import suggestions, wording
from slimx.config.foreign_names import to_known_names
from slimx.config.rule import Refusal, refuse
from slimx.config.schema import Config
from slimx.config.section import echoed
from slimx.config.sections.objectives import OBJECTIVES, merged_objective
from slimx.errors import SlimxError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `section.key=value` overrides in order, check, and return the run's configuration.

    Raises SlimxError naming the file or the override, the key, and the nearest known key for a misspelt one.
    """
    try:
        return _load(Path(path).expanduser(), overrides)
    except RecursionError:
        raise SlimxError(
            f"{path}: lists or mappings in it or in an override are nested too deeply to be read; write it flatter",
            code="config.depth",
            about=str(path),
        ) from None


def _load(path: Path, overrides: Sequence[str]) -> Config:
    if not path.is_file():
        raise SlimxError(wording.no_file(path), code="config.no_file", about=str(path))
    try:
        tree = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:  # an integer of thousands of digits, too
        line, told = wording.not_yaml(error, path.read_text(errors="replace"))
        where = path if line is None else f"{path}, line {line}"
        raise SlimxError(f"{where}: {told}", code="config.not_yaml", about=str(path)) from error
    if (told := wording.no_sections(path, tree, Config.model_fields)) is not None:
        raise SlimxError(f"{path}: {told}", code="config.no_sections", about=str(path))
    tree, given = _named(tree, str(path)), {}
    for number, override in enumerate(overrides):
        if "=" not in override or override.startswith("="):
            told = wording.no_override(override, overrides[number + 1 : number + 3], suggestions.known_keys(Config))
            raise SlimxError(told, code="config.override", about=override)
        where = f"override {echoed(override)!r}"
        try:
            key, _, value = override.lstrip("+").partition("=")  # Hydra's mark of a new key
            named = _named(OmegaConf.from_dotlist([f"{key}={value}"]), where)
            values = OmegaConf.to_container(named, resolve=False)
            tree = _merged(tree, values, where)
            given[_dotted(values)] = override
        except YAMLError as error:
            told = f"{where}: {wording.not_yaml(error, override)[1]}"
            raise SlimxError(told, code="config.override", about=override) from error
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            told = f"{where} cannot be applied ({wording.not_applied(error)})"
            raise SlimxError(told, code="config.override", about=override) from error
    try:
        values = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        told = wording.no_interpolation(error, suggestions.known_keys(Config))
        where = f"{path}: " + (f"{error.full_key}: " if error.full_key else "")
        raise SlimxError(where + told, code="config.interpolation", about=str(path)) from error
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        _refuse([problem for item in error.errors() for problem in _problems(item, given)], path, given, error)
    config._interpolated = dict(_interpolations(OmegaConf.to_container(tree, resolve=False)))
    return config


def _named(tree: DictConfig, where: str) -> DictConfig:
    """The tree with its keys under the names that the schema knows."""
    values = OmegaConf.to_container(tree, resolve=False)
    to_known_names(values, where)
    return OmegaConf.create(values)


def _merged(tree: DictConfig, override: dict[str, Any], where: str) -> DictConfig:
    """`tree` with the values of an override, which may name single entries of lists by their places, from 0; null in
    place of a section or a mapping takes away what the file has of it, null in place of a list and {} empty it."""
    *above, last = path = _dotted(override).split(".")
    base = OmegaConf.to_container(tree, resolve=False)
    value, section = functools.reduce(_inner, path, override), functools.reduce(_inner, above, base)
    if value is None and suggestions.resets(Config, path):
        if isinstance(section, dict):
            section.pop(last, None)
        return OmegaConf.create(base)
    if value == {} and isinstance(section, dict) and isinstance(section.get(last), dict):
        section[last] = {}
        return OmegaConf.create(base)
    if value is None and suggestions.is_list(Config, path):
        functools.reduce(_inner, above, override)[last] = []
    _take_objectives(override, base)
    try:
        return OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(_listed(override, base, (), where)))
    except (OmegaConfBaseException, TypeError) as error:
        if "incompatible container types" not in str(error):
            raise
        told = f"{where}: {suggestions.for_entry(Config, path, value)}"
        raise SlimxError(told, code="config.override", about=".".join(path)) from error


def _take_objectives(override: dict[str, Any], base: dict[str, Any]) -> None:
    """Move the losses and estimators of `override` into `base`."""
    for key, inner in override.items():
        if not isinstance(inner, dict):
            continue
        if key == "algorithm":
            section = base[key] = base.get(key) or {}
            for name in OBJECTIVES.keys() & inner.keys():
                section[name] = merged_objective(section.get(name), inner.pop(name))
        elif isinstance(base.get(key), dict):
            _take_objectives(inner, base[key])


def _listed(override: Any, base: Any, path: tuple[str, ...], where: str) -> Any:
    """`override` with whole lists where it has mappings from places in the lists of `base`, or of the defaults, to
    entries."""
    if not isinstance(override, dict):
        return override
    entries = None
    if override and all(str(key).isdigit() for key in override):
        entries = (
            list(base) if isinstance(base, list) else suggestions.default_list(Config, path) if base is None else None
        )
    if entries is None:
        return {key: _listed(inner, _inner(base, key), (*path, str(key)), where) for key, inner in override.items()}
    for place, inner in override.items():
        if int(place) > len(entries):
            key = ".".join(path)
            raise SlimxError(
                f"{where}: {key} has {len(entries)} entries, the first at 0; write {key}.{len(entries)} for another",
                code="config.entry",
                about=f"{key}.{place}",
            )
        entries += [{}] * (int(place) == len(entries))
        before = entries[int(place)]
        entry = _listed(inner, before, (*path, str(place)), where)
        both = isinstance(before, dict) and isinstance(entry, dict)
        entries[int(place)] = OmegaConf.merge(before, entry) if both else entry
    return entries


def _inner(tree: Any, key: Any) -> Any:
    """The value at `key` of a mapping, or at a place of a list; None: there is none."""
    if isinstance(tree, list):
        return tree[int(key)] if str(key).isdigit() and int(key) < len(tree) else None
    return tree.get(key) if isinstance(tree, dict) else None


def _dotted(tree: Any) -> str:
    """The key that the tree of one override sets."""
    ((key, inner),) = tree.items()
    return f"{key}.{_dotted(inner)}" if isinstance(inner, dict) and len(inner) == 1 else str(key)


def _interpolations(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Places at which a tree holds `${...}`, as paths of keys and indices, each with its text."""
    if isinstance(value, str) and "${" in value:
        yield at, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _interpolations(part, (*at, key))


def _problems(item: Any, given: Mapping[str, str]) -> Sequence[SlimxError]:
    """Refusals behind one of pydantic's errors; `given` has the overrides by their keys."""
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Refusal):
        return cause.problems or (cause,)
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        keys = suggestions.of_section(Config, item["loc"], item["input"]) or [(item["loc"], item["input"])]
        return [_unknown(path, value, given) for path, value in keys]
    if item["type"] == "missing":
        told = f"{where} is missing; set it in the file or with {where}=VALUE"
        return (SlimxError(told, code="config.missing_key", about=where),)
    return (SlimxError(wording.value(where, item), code="config.value", about=where),)


def _unknown(path: Sequence[str | int], value: Any, given: Mapping[str, str]) -> SlimxError:
    key = ".".join(map(str, path))
    hint = suggestions.for_key(Config, path, value, override=_override_of(key, given) is not None)
    return SlimxError(f"unknown key {echoed(key)}; {hint}", code="config.unknown_key", about=key)


def _override_of(key: str, given: Mapping[str, str]) -> str | None:
    """The last override that set `key`, or a part of it; None: it stands in the file, or nowhere."""
    return next(
        (
            text
            for name, text in reversed(given.items())
            if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")
        ),
        None,
    )


def _refuse(problems: Sequence[SlimxError], path: Path, given: Mapping[str, str], cause: Exception) -> None:
    """Raise the refusals, each blamed on the override that it is about, else on the file."""
    places = [_override_of(problem.about, given) if problem.about else None for problem in problems]
    names = [str(path) if text is None else f"override {echoed(text)!r}" for text in places]
    if len({*names}) == 1:
        refuse(problems, f"{names[0]}: ", cause)
    placed = [
        SlimxError(f"{name}: {problem}", code=problem.code, about=problem.about)
        for name, problem in zip(names, problems, strict=True)
    ]
    refuse(placed, "", cause)
