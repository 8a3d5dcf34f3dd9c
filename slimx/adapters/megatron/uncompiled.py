"""Imports megatron-core into a process that trains nothing, without the compiler that its fused functions name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Leave functions that are decorated inside the block uncompiled.

    megatron.core decorates some with torch.compile while it is imported, which imports the compiler at once: two
    seconds, for functions that a process without a model never calls.
    """
    compiler = torch.compile
    torch.compile = lambda model=None, **options: model or (lambda function: function)
    try:
        yield
    finally:
        torch.compile = compiler
