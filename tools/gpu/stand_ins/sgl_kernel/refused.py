"""Operations that are imported but never called where a stand-in is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def refused(name: str) -> Callable[..., NoReturn]:
    """Returns a function in the place of the operation `name` that raises NotImplementedError."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but sglang-kernel is not installed here: tools/gpu/stand_ins has the "
            "operations of a Qwen3-MoE in bfloat16 alone"
        )

    call.__name__ = name
    return call
