"""Every number of the configuration is bounded, so that arithmetic on it ends."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.rollout import Rollout
from tests.refusals import invalid


def numbers(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[tuple[type, list[Any]]]:
    """Every int and float inside a type, with what bounds it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (int, float):
        yield annotation, [bound for item in metadata for bound in getattr(item, "metadata", None) or [item]]
    elif origin is typing.Annotated:
        yield from numbers(arguments[0], [*metadata, *arguments[1:]])
    elif origin is not typing.Literal:
        for argument in arguments:
            yield from numbers(argument, metadata if origin in (typing.Union, types.UnionType) else ())


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from sections(inner)


def test_every_number_of_the_schema_has_finite_bounds():
    found = 0
    for model in set(sections(Config)):
        assert model.model_config["allow_inf_nan"] is False
        for name, field in model.model_fields.items():
            for _, bounds in numbers(field.annotation, field.metadata):
                found += 1
                low = [bound for bound in bounds if {"ge", "gt"} & set(dir(bound))]
                high = [bound for bound in bounds if {"le", "lt"} & set(dir(bound))]
                assert low and high, f"{model.__name__}.{name} has no {'upper' if low else 'lower'} bound"
    assert found > 100


def listing(**group: Any) -> Rollout:
    """Returns the section that lists an engine group, which it checks."""
    return Rollout(prompts="p", engines=(Engines(**group),))


@pytest.mark.parametrize("share", [0, 1, 16, -0.5, "0.8", True, [0.8]])
def test_the_engines_share_of_memory_is_between_0_and_1(share: Any):
    with invalid("engines.sglang_value", about="rollout.engines.sglang.mem_fraction_static"):
        listing(sglang={"mem_fraction_static": share})
    assert Engines(sglang={"mem_fraction_static": 0.8}).sglang == {"mem_fraction_static": 0.8}


def test_a_group_of_more_servers_than_there_are_gpus_is_refused():
    with invalid("engines.group_ranks", about="rollout.engines"):
        listing(count=65536, tensor=64)
    with invalid("engines.server_ranks", about="rollout.engines"):
        listing(tensor=65536)
