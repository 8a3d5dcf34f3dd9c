"""Type, default, choices and description of a configuration key, in the terms of YAML."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
CONSTANTS = {None: "null", True: "true", False: "false"}


def description_of(field: FieldInfo) -> str:
    """Returns the field's docstring on one line."""
    return " ".join((field.description or "").split())


def section_in(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """Returns the section class of a field's type, and what follows its key in the dotted keys of its fields: "", or
    ".*" if the type is a list or a mapping of such sections. Returns None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    for argument in typing.get_args(annotation):
        found = section_in(argument)
        if found is not None:
            return found[0], ".*" if typing.get_origin(annotation) in (tuple, list, dict) else found[1]
    return None


def type_of(field: FieldInfo) -> str:
    """Returns the type with its bounds; choices are in backticks."""
    return _bounded(_words(field.annotation), field.metadata)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Returns the values of a type that lists them, such as "true" and "false"; () for any other type."""
    if annotation is bool:
        return "true", "false"
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        found: tuple[str, ...] = ()
        for argument in typing.get_args(annotation):
            found += choices_of(argument)
        return found
    return ()


def default_of(field: FieldInfo) -> str:
    """Returns the default, or "required"; texts and numbers are in backticks."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, bool):
        return CONSTANTS[value]
    if isinstance(value, tuple | list | dict):
        return f"[{', '.join(map(str, value))}]" if value else "empty"
    return f"`{value}`"


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
        return " or ".join(map(_words, arguments))
    if origin is tuple:
        length = "" if arguments[-1] is ... else f" {len(arguments)}:"
        return f"list of{length} {_words(arguments[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    return NAMES[annotation]


def _bounds(item: Any) -> Iterator[str]:
    if isinstance(item, FieldInfo):
        for inner in item.metadata:
            yield from _bounds(inner)
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if getattr(item, attribute, None) is not None:
            yield f"{sign} {getattr(item, attribute)}"
