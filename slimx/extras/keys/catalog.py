"""All sections of the configuration, in the order of the schema, each with its keys."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.objectives import OBJECTIVES, Objective
from slimx.extras.keys.fields import choices_of, default_of, description_of, section_in, type_of

HOOKS = {
    "reward.function": "slimx.rewards",
    "reward.parts.*.function": "slimx.rewards",
    "rollout.generate": "slimx.generate",
    "rollout.map": "slimx.maps",
    "eval.map": "slimx.maps",
}
"""Entry point group with the names that a key accepts besides dotted paths."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key that takes a value."""

    path: str
    """Dotted key, with `*` for an entry of a list or mapping."""
    type: str
    """Type with its bounds; choices are in backticks."""
    default: str
    """Default, "required" or "empty"; texts and numbers are in backticks."""
    text: str
    """Description, on one line."""
    choices: tuple[str, ...] = ()
    """Values, or names besides dotted paths; () if the type does not list them."""
    kinds: tuple[str, ...] = ()
    """Kinds of loss or advantages that have this key; () for a key of other sections."""

    @property
    def name(self) -> str:
        """Last part of the dotted key."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Heading:
    """A section of keys."""

    path: str
    """Dotted key, with `*` for an entry of a list or mapping."""
    text: str
    """Description, on one line; "" if there is none."""
    keys: tuple[Key, ...]
    like: str = ""
    """Path of the section that has the same keys and lists them; "" if this section lists its keys."""


@functools.cache
def headings() -> tuple[Heading, ...]:
    """Returns all sections, each followed by the sections in it."""
    seen: dict[type[BaseModel], str] = {}
    return tuple(_sections(Config, "", seen))


@functools.cache
def all_keys() -> Mapping[str, Key]:
    """Returns every key that takes a value, by dotted key."""
    return {key.path: key for heading in headings() for key in heading.keys}


def _sections(model: type[BaseModel], prefix: str, seen: dict[type[BaseModel], str]) -> Iterator[Heading]:
    """Yields the sections in `model` and below. `prefix`: dotted key of `model` with a final dot; `seen`: path of the
    first section of each class, to which those that were found are added."""
    for name, field in model.model_fields.items():
        found = section_in(field.annotation)
        if found is None:
            continue
        inner, entry = found
        path = f"{prefix}{name}{entry}"
        text = description_of(field)
        records = OBJECTIVES.get(name) if prefix == "algorithm." else None
        if records is not None:
            yield Heading(path, text, tuple(_of_objectives(path, records)))
        elif inner in seen and (prefix.count(".") > 1 or prefix.startswith("policies.")):
            yield Heading(path, text, (), like=seen[inner])
        else:
            seen.setdefault(inner, path)
            yield Heading(path, text, tuple(_of_section(path, inner)))
            yield from _sections(inner, f"{path}.", seen)


def _of_section(section: str, model: type[BaseModel]) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        if section_in(field.annotation) is None:
            path = f"{section}.{name}"
            choices = choices_of(field.annotation)
            if path in HOOKS:
                choices = tuple(entry_points.find(HOOKS[path]))
            yield Key(path, type_of(field), default_of(field), description_of(field), choices)


def _of_objectives(section: str, records: Mapping[str, type[Objective]]) -> Iterator[Key]:
    """Yields `kind`, and every parameter of a section with a `kind`; parameters of several kinds are one key if they
    have the same type, default and description."""
    kinds: dict[tuple[str, str, str, str], tuple[str, ...]] = {}
    for kind, record in records.items():
        for name, field in record.model_fields.items():
            if name != "kind":
                row = (f"{section}.{name}", type_of(field), default_of(field), description_of(field))
                kinds[row] = (*kinds.get(row, ()), kind)
    names = tuple(records)
    known = ", ".join(f"`{kind}`" for kind in names)
    text = f"One of {known}, or the dotted path of a hook."
    yield Key(f"{section}.kind", "text", f"`{names[0]}`", text, names, ("all",))
    for (path, words, default, description), owners in kinds.items():
        yield Key(path, words, default, description, (), owners)
