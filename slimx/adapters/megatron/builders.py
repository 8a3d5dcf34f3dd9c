"""Reads the specs of megatron-core's layers, which name a module in several forms. Written for 0.19.2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules

type Builder = ModuleSpec | partial[object] | Callable[..., object]
"""Names a module in a spec: a ModuleSpec, a class or function, or either with some of its arguments."""


def kind_of(builder: Builder) -> Callable[..., object]:
    """Returns the class or function that a builder calls."""
    if isinstance(builder, ModuleSpec):
        return builder.module
    return builder.func if isinstance(builder, partial) else builder


def submodules_of(builder: Builder) -> dict[str, Builder]:
    """Returns the builders that `builder` passes on, by the field of its submodules."""
    parts = get_submodules(builder) if isinstance(builder, ModuleSpec | partial) else None
    if parts is None:
        return {}
    builders = {}
    for field in dataclasses.fields(parts):
        value = getattr(parts, field.name)
        if callable(value):
            builders[field.name] = value
    return builders


def exchange(builder: Builder, parts: Mapping[Callable[..., object], ModuleSpec]) -> Builder:
    """Returns the replacement of `builder`: the entry of `parts` for its class or function, with the arguments of both.
    Submodules and a ModuleSpec are exchanged in place."""
    for name, value in submodules_of(builder).items():
        setattr(get_submodules(builder), name, exchange(value, parts))
    other = parts.get(kind_of(builder))
    if other is None:
        return builder
    if isinstance(builder, ModuleSpec):
        builder.module = other.module
        builder.params = {**builder.params, **other.params}
        return builder
    if isinstance(builder, partial):
        return partial(other.module, *builder.args, **builder.keywords, **other.params)
    return other
