"""Writes docs/configuration.md from the configuration's schema.

    python tools/docs/make_configuration.py

A unit test compares the page with the schema, so run this after every change of a section in slimx/config/.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slimx.config.foreign_names import ALIASES
from slimx.config.rule import FACTS, Rule, all_rules
from slimx.config.schema import Config
from slimx.config.sections.objectives import OBJECTIVES, Objective

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """\
# Configuration

This page is made from `slimx/config/` by `python tools/docs/make_configuration.py`.

A run is one YAML file of sections. `slimx train FILE section.key=value ...` overrides single keys, in the order given.
A list is overridden as a whole, `'rollout.engines=[{name: actor, count: 2}]'`, or in one entry,
`rollout.engines.0.count=2`; `null` or `{}` empties a mapping, `null` or `[]` a list. In a path, `~` is the home
directory. An unknown key is refused with the nearest known one, and a key or flag of slime, Megatron-LM, verl or TRL
with the key that says the same here. Keys are checked against each other, and against checkpoint, prompts and hooks,
before anything starts; `slimx doctor FILE` does the same checks and starts nothing.

`configs/moe/` holds complete examples.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        model = _model_in(field.annotation)
        parts.append(f"\n## {name}\n")
        parts += [f"\n{_description(field)}\n"] if field.description else []
        parts += _table(model, name)
        for key, inner, text in _nested(model, name):
            parts.append(f"\n### {key}\n" + (f"\n{text}\n" if text else ""))
            records = OBJECTIVES.get(key.removeprefix("algorithm."))
            parts += _objectives(records) if records else _table(inner, key)
    return "".join([*parts, *_other_names(), *_rules()])


def _other_names() -> Iterator[str]:
    yield "\n## Other names\n\nThese name the same keys. A key that is given under two names is refused.\n"
    yield "\n| section | name | key |\n| --- | --- | --- |\n"
    for old, name in ALIASES.items():
        section, _, last = old.rpartition(".")
        yield f"| `{section.removesuffix('.*')}` | `{last}` | `{name}` |\n"


def _rules() -> Iterator[str]:
    yield "\n## Rules\n\nEach rule is asked as soon as what it needs is at hand. Rules of the configuration are asked\n"
    yield "when it is loaded, those of the model by `slimx plan` too, all others by `slimx doctor` and at the start.\n"
    yield "\n| code | about | needs |\n| --- | --- | --- |\n"
    for rule in all_rules():
        yield f"| {rule.code} | {rule.about} | {_needs(rule)} |\n"


def _needs(rule: Rule) -> str:
    """Returns the most expensive input that the rule needs."""
    return next((need for need in reversed(FACTS) if rule.facts & {*FACTS[need]}), "configuration")


def _table(model: type[BaseModel], section: str) -> Iterator[str]:
    yield "\n| key | type | default | description |\n| --- | --- | --- | --- |\n"
    for name, field in model.model_fields.items():
        if _model_in(field.annotation):
            continue
        cells = (f"`{name}`", _type(field), _default(field), _description(field).replace("|", "\\|"))
        yield f"| {' | '.join(cells)} |\n"


def _objectives(records: Mapping[str, type[Objective]]) -> Iterator[str]:
    """Yields the rows of a key with a `kind`: every parameter, with the kinds that have it."""
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    for kind, record in records.items():
        for name, field in record.model_fields.items():
            if name != "kind":
                row = (f"`{name}`", _type(field), _default(field), _description(field).replace("|", "\\|"))
                kinds.setdefault(row, []).append(kind)
    known = ", ".join(f"`{kind}`" for kind in records)
    yield "\n| key | type | default | of the kinds | description |\n| --- | --- | --- | --- | --- |\n"
    yield f"| `kind` | text | `{next(iter(records))}` | all | One of {known}, or the dotted path of a hook. |\n"
    for (name, words, default, description), owners in kinds.items():
        yield f"| {name} | {words} | {default} | {', '.join(f'`{owner}`' for owner in owners)} | {description} |\n"


def _nested(model: type[BaseModel], section: str) -> Iterator[tuple[str, type[BaseModel], str]]:
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            text = f"{_description(field)} " if field.description else ""
            several = "A list; each entry has these keys." if typing.get_origin(field.annotation) is tuple else ""
            yield f"{section}.{name}", inner, f"{text}{several}"


def _description(field: FieldInfo) -> str:
    """Returns the field's docstring on one line."""
    return " ".join((field.description or "").split())


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the section class of a field, or of the items of its tuple or mapping; None for a plain value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(candidate) is typing.Annotated:
            return _model_in(typing.get_args(candidate)[0])
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _type(field: FieldInfo) -> str:
    """Returns the type and its bounds in the terms of YAML."""
    return _bounded(_words(field.annotation), field.metadata).replace("|", "\\|")


def _bounded(words: str, metadata: Sequence[Any]) -> str:
    bounds = ", ".join(text for item in metadata for text in _bounds(item))
    return f"{words} {bounds}" if bounds else words


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _bounded(_words(arguments[0]), arguments[1:])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is tuple:
        return (
            f"list of {_words(arguments[0])}"
            if arguments[-1] is ...
            else f"list of {len(arguments)}: {_words(arguments[0])}"
        )
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    return names[annotation]


def _bounds(item: Any) -> Iterator[str]:
    if isinstance(item, FieldInfo):
        yield from (text for inner in item.metadata for text in _bounds(inner))
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if getattr(item, attribute, None) is not None:
            yield f"{sign} {getattr(item, attribute)}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (tuple, list, dict)):
        return "empty" if not value else f"[{', '.join(map(str, value))}]"
    return f"`{value}`"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"{PAGE}: {len(page().splitlines())} lines")
