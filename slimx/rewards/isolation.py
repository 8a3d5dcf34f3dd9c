"""How a reward hook says that it must run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., Any])


def needs_process(hook: Hook) -> Hook:
    """Mark a hook that computes for long without awaiting: in a thread it could not be ended at its deadline, and would
    hold up all others while it runs."""
    hook.needs_process = True  # type: ignore[attr-defined]
    return hook


def asks_for_process(hook: Any) -> bool:
    """Whether `needs_process` marks the hook, or the function behind a partial."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "needs_process", False)
