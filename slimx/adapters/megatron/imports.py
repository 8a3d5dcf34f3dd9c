"""Imports of megatron-core 0.19.2: without packages that a slimx process does not use, and with the names that it
expects from DeepEP."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator

import torch

from slimx.errors import SlimxError

TRACKERS = ("wandb", "torch.utils.tensorboard")
"""megatron-core's timers write to them if they are importable: a second per process if wandb is installed."""


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Leaves functions decorated inside the block uncompiled.

    megatron.core decorates some with torch.compile at import, which imports the compiler at once: two seconds, for
    functions that a process without a model never calls.
    """
    compiler = torch.compile
    torch.compile = _uncompiled  # type: ignore[assignment]  # replaces its overloads
    try:
        yield
    finally:
        torch.compile = compiler


def _uncompiled(model: object = None, **options: object) -> object:
    return model or (lambda function: function)


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """Hides trackers that are not imported yet from imports inside the block: only the driver writes metrics."""
    hidden = [name for name in TRACKERS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an import of it raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def prepare_deep_ep(*, needed: bool) -> list[str]:
    """Prepares the import of DeepEP; call before megatron.core is imported. `needed`: whether the trainer dispatches
    with it.

    `megatron.core.transformer.moe.fused_a2a` imports EventHandle and EventOverlap from deep_ep.utils and works without
    DeepEP if that raises ImportError. In sgl-deep-ep 0.1.2.post1 that module lacks EventOverlap, so every flex
    dispatcher would be refused; and its import fails an assertion without a CUDA toolkit.

    Returns the names of the changes. Raises SlimxError if DeepEP is needed and cannot be imported."""
    if importlib.util.find_spec("deep_ep") is None:
        return []
    try:
        package = importlib.import_module("deep_ep")
        utils = importlib.import_module("deep_ep.utils")
    except (ImportError, AssertionError) as error:
        if needed:
            raise SlimxError(
                f"trainer.moe.dispatcher=flex needs deep_ep, whose import fails ({type(error).__name__}: {error}); run "
                "`slimx doctor` on this host, or set trainer.moe.dispatcher=alltoall",
                code="trainer.deep_ep",
                about="trainer.moe.dispatcher",
            ) from error
        # An import of it now raises ImportError, which megatron-core expects.
        sys.modules["deep_ep"] = None  # type: ignore[assignment]  # documented by Python, missing in typeshed
        return ["no_deep_ep"]
    if hasattr(utils, "EventOverlap"):  # other builds of DeepEP have it
        return []
    vars(utils)["EventOverlap"] = package.EventOverlap
    return ["deep_ep_events"]
