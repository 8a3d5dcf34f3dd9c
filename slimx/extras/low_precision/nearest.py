"""Suggests parallel sizes close to those of a configuration whose sizes split blocks that share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slimx.layout.ranks import Sizes, sizes_of

if TYPE_CHECKING:
    from slimx.config.schema import Config


def nearest(config: Config, sizes: Sizes) -> Iterator[tuple[str, Config, Sizes]]:
    """Yields alternatives to `config`, whose trainers have `sizes`. Each alternative is a tuple: the changed key with
    its new value, such as trainer.tensor=2; the changed configuration; and the trainers' sizes in that configuration.

    Changes to engines come first: larger expert parallel sizes, then smaller tensor parallel sizes. Smaller trainer
    sizes follow. An alternative may not fit the model or the number of ranks.
    """
    group = config.served.policy[0]
    divisors = _divisors(group.tensor)
    engines = [("expert", size) for size in divisors if size > group.expert]
    engines += [("tensor", size) for size in reversed(divisors) if group.expert <= size < group.tensor]
    for key, size in engines:
        groups = []
        for engine in config.rollout.engines:
            groups.append(engine if engine.frozen else engine.model_copy(update={key: size}))
        yield f"rollout.engines.{key}={size}", _with(config, "rollout", engines=tuple(groups)), sizes
    current = {"expert_tensor": sizes.expert_tensor, "tensor": sizes.tensor}
    for key, now in current.items():
        for size in reversed(_divisors(now)[:-1]):
            near = _with(config, "trainer", **{key: size})
            yield f"trainer.{key}={size}", near, sizes_of(near.trainer)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _with(config: Config, section: str, **keys: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})
