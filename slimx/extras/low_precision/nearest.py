"""Parallel sizes near those of a configuration: its own cut blocks that have one scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slimx.layout.ranks import Sizes, sizes_of

if TYPE_CHECKING:
    from slimx.config.schema import Config


def nearest(config: Config, sizes: Sizes) -> Iterator[tuple[str, Config, Sizes]]:
    """The key with its new value, the configuration that has it, and the trainers' sizes then: of engines first, with
    experts cut less or on fewer ranks, then of trainers. They may not fit the model, or the ranks."""
    group = config.rollout.policy_engines[0]
    whole = _divisors(group.tensor)
    engines = [("expert", size) for size in whole if size > group.expert]
    engines += [("tensor", size) for size in reversed(whole) if group.expert <= size < group.tensor]
    for key, size in engines:
        groups = tuple(each if each.frozen else each.model_copy(update={key: size}) for each in config.rollout.engines)
        yield f"rollout.engines.{key}={size}", _with(config, "rollout", engines=groups), sizes
    for key, now in (("expert_tensor", sizes.expert_tensor), ("tensor", sizes.tensor)):
        for size in reversed(_divisors(now)[:-1]):
            near = _with(config, "trainer", **{key: size})
            yield f"trainer.{key}={size}", near, sizes_of(near.trainer)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _with(config: Config, section: str, **keys: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})
