"""Marks by which a hook says its needs: a process of its own, an answer, checks before the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Hook = Callable[..., Any]


def needs_process[H: Hook](hook: H) -> H:
    """Mark a hook that computes for long without awaiting: in a thread it could not be ended at its deadline, and would
    hold up all others while it runs."""
    hook.needs_process = True  # type: ignore[attr-defined]
    return hook


def checked_by(check: Callable[..., None]) -> Callable[[Hook], Hook]:
    """Have `check` called with the hook's options before a run starts; what it raises (SlimxError) ends the start."""

    def mark(hook: Hook) -> Hook:
        hook.check = check  # type: ignore[attr-defined]
        return hook

    return mark


def checks_prompts(check: Callable[..., None]) -> Callable[[Hook], Hook]:
    """Have `check` called with the prompts that the hook will judge before a run starts; what it raises (SlimxError)
    ends the start. That of a generate hook gets the hook's options, too, and `tokenizer` where that is a parameter."""

    def mark(hook: Hook) -> Hook:
        hook.check_prompts = check  # type: ignore[attr-defined]
        return hook

    return mark


def needs_answer[H: Hook](hook: H) -> H:
    """Mark a hook that compares with the prompt's answer, and raises for a prompt without one."""
    hook.needs_answer = True  # type: ignore[attr-defined]
    return hook


def asks_for_answer(hook: Any) -> bool:
    """Returns True if `needs_answer` marks the hook, or the function behind a partial."""
    return getattr(_function(hook), "needs_answer", False)


def asks_for_process(hook: Any) -> bool:
    """Returns True if `needs_process` marks the hook, or the function behind a partial."""
    return getattr(_function(hook), "needs_process", False)


def check(hook: Any) -> None:
    """Call the check that the hook has, if it has one, with the options that a partial fills in."""
    options = hook.keywords if isinstance(hook, partial) else {}
    getattr(_function(hook), "check", lambda **_: None)(**options)


def prompt_check(hook: Any) -> Callable[..., None] | None:
    """The check of prompts that `checks_prompts` gave the hook, or the function behind a partial; None without one."""
    return getattr(_function(hook), "check_prompts", None)


def _function(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook
