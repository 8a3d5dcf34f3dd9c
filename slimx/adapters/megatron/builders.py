"""Reads and changes the specs of megatron-core's layers. A spec can describe in several ways how to build a module.
Written for megatron-core 0.19.2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules

type Builder = ModuleSpec | partial[object] | Callable[..., object]
"""A spec's description of how to build one module: a ModuleSpec, a class or function, or a partial of one."""


def kind_of(builder: Builder) -> Callable[..., object]:
    """Returns the class or function that `builder` calls to build its module."""
    if isinstance(builder, ModuleSpec):
        return builder.module
    return builder.func if isinstance(builder, partial) else builder


def submodules_of(builder: Builder) -> dict[str, Builder]:
    """Returns the builders of a module's submodules, by field name in the module's submodules dataclass; empty if the
    module has none."""
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
    """Replaces classes throughout the spec `builder` and returns the changed spec. `parts`: class or function to
    replace -> its replacement, whose params are added to the original arguments. Submodules and ModuleSpecs are changed
    in place."""
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
