"""Prepares imports of megatron-core 0.19.2: hides packages that a slimx process does not use, and supplies the names
that megatron-core expects from DeepEP."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator

import torch

from slimx.errors import SlimxError

TRACKERS = ("wandb", "torch.utils.tensorboard")
"""Experiment trackers that megatron-core's timers import if they are installed; importing wandb takes a second per
process."""


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Turns torch.compile into a no-op inside the block.

    megatron.core decorates functions with torch.compile when it is imported, which imports the compiler at once. That
    takes two seconds, for functions that a process without a model never calls.
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
    """Makes imports of `TRACKERS` inside the block fail, unless they are already imported, because only the driver
    writes metrics."""
    hidden = [name for name in TRACKERS if name not in sys.modules]
    # None makes imports of the name raise ImportError.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def prepare_deep_ep(*, needed: bool) -> list[str]:
    """Makes megatron-core's import of DeepEP work, or hides DeepEP from it; call this before importing megatron.core.
    `needed`: True if the trainer dispatches tokens with DeepEP.

    `megatron.core.transformer.moe.fused_a2a` imports EventHandle and EventOverlap from deep_ep.utils and works without
    DeepEP if that raises ImportError. In sgl-deep-ep 0.1.2.post1, deep_ep.utils lacks EventOverlap, so megatron-core
    would refuse every flex dispatcher. Without a CUDA toolkit, importing that release fails with an AssertionError.

    Returns the names of the changes made. Raises SlimxError if DeepEP is installed and needed but cannot be
    imported."""
    if importlib.util.find_spec("deep_ep") is None:
        return []
    try:
        package = importlib.import_module("deep_ep")
        utils = importlib.import_module("deep_ep.utils")
    except (ImportError, AssertionError) as error:
        if needed:
            raise SlimxError(
                f"trainer.moe.dispatcher=flex needs deep_ep, which cannot be imported ({type(error).__name__}: "
                f"{error}); reinstall deep_ep on this host, or set trainer.moe.dispatcher=alltoall",
                code="trainer.deep_ep",
                about="trainer.moe.dispatcher",
            ) from error
        # From here on, importing deep_ep raises ImportError, which megatron-core handles.
        sys.modules["deep_ep"] = None  # type: ignore[assignment]  # documented by Python, missing in typeshed
        return ["no_deep_ep"]
    if hasattr(utils, "EventOverlap"):  # other releases of DeepEP define it there
        return []
    vars(utils)["EventOverlap"] = package.EventOverlap
    return ["deep_ep_events"]
