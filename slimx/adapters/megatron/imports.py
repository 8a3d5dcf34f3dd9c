"""Imports megatron-core without packages that it names and a process of slimx does not use. Written for 0.19.2."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

TRACKERS = ("wandb", "torch.utils.tensorboard")
"""megatron-core's timers write to them if they can be imported: a second for each process where wandb is installed."""


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


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """Hide from imports inside the block the trackers that are not imported yet: the driver alone writes metrics."""
    hidden = [name for name in TRACKERS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
