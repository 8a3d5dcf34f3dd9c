"""Imports of megatron-core 0.19.2: without packages that a process of slimx does not use, and with the names that it
expects of DeepEP."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator

import torch

from slimx.errors import SlimxError

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


def prepare_deep_ep(*, needed: bool) -> list[str]:
    """Prepare the import of DeepEP; call before megatron.core is imported. `needed`: whether the trainer dispatches by
    it.

    `megatron.core.transformer.moe.fused_a2a` takes EventHandle and EventOverlap from deep_ep.utils and, where that is
    no ImportError, lives without DeepEP. sgl-deep-ep 0.1.2.post1 has only the first of them there, so that every flex
    dispatcher would be refused; and it fails an assertion where it finds no CUDA toolkit.

    Returns the names of what was done. Raises SlimxError if DeepEP is needed and cannot be imported."""
    if importlib.util.find_spec("deep_ep") is None:
        return []
    try:
        package, utils = importlib.import_module("deep_ep"), importlib.import_module("deep_ep.utils")
    except (ImportError, AssertionError) as error:
        if needed:
            raise SlimxError(
                f"trainer.moe.dispatcher=flex needs deep_ep, whose import fails ({type(error).__name__}: {error}); ask "
                "`slimx doctor` on this machine, or set trainer.moe.dispatcher=alltoall",
                code="trainer.deep_ep",
                about="trainer.moe.dispatcher",
            ) from error
        sys.modules["deep_ep"] = None  # an import of it is now an ImportError, which megatron-core expects
        return ["no_deep_ep"]
    if hasattr(utils, "EventOverlap"):  # other builds of DeepEP have it
        return []
    utils.EventOverlap = package.EventOverlap
    return ["deep_ep_events"]
