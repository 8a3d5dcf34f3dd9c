"""Decorators by which a hook declares its requirements: a separate process, prompts with answers, and checks before the
run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

Hook = Callable[..., object]


def needs_process[H: Hook](hook: H) -> H:
    """Marks a hook that computes for long without awaiting, so that it runs in a separate process.

    In a thread it could not be stopped at its deadline, and would delay all other hooks.
    """
    hook.needs_process = True  # type: ignore[attr-defined]
    return hook


def checked_by(check: Callable[..., None]) -> Callable[[Hook], Hook]:
    """Returns a decorator that attaches `check` to a hook. Before a run starts, `check` is called with the hook's
    options.

    If `check` raises SlimxError, the run does not start.
    """

    def mark(hook: Hook) -> Hook:
        hook.check = check  # type: ignore[attr-defined]
        return hook

    return mark


def checks_prompts(check: Callable[..., None]) -> Callable[[Hook], Hook]:
    """Returns a decorator that attaches `check` to a hook. Before a run starts, `check` is called with the hook's
    prompts.

    If `check` raises SlimxError, the run does not start. The check of a generate hook also receives the hook's options,
    and `tokenizer` if it has a parameter of that name.
    """

    def mark(hook: Hook) -> Hook:
        hook.check_prompts = check  # type: ignore[attr-defined]
        return hook

    return mark


def needs_answer[H: Hook](hook: H) -> H:
    """Marks a hook that compares responses with the prompt's answer and raises SlimxError if there is none. A run in
    which too many prompts have no answer is refused at its start."""
    hook.needs_answer = True  # type: ignore[attr-defined]
    return hook


def asks_for_answer(hook: object) -> bool:
    """Returns True if the hook, or the function that it wraps as a `functools.partial`, is marked by `needs_answer`."""
    return getattr(_function(hook), "needs_answer", False)


def asks_for_process(hook: object) -> bool:
    """Returns True if the hook, or the function that it wraps as a `functools.partial`, is marked by
    `needs_process`."""
    return getattr(_function(hook), "needs_process", False)


def check(hook: object) -> None:
    """Calls the check that `checked_by` attached to the hook, if any, with the options bound by `functools.partial`."""
    options = hook.keywords if isinstance(hook, partial) else {}
    getattr(_function(hook), "check", lambda **_: None)(**options)


def prompt_check(hook: object) -> Callable[..., None] | None:
    """Returns the check that `checks_prompts` attached to the hook, or to the function that it wraps as a
    `functools.partial`; None if there is no check."""
    return getattr(_function(hook), "check_prompts", None)


def _function(hook: object) -> object:
    while isinstance(hook, partial):
        hook = hook.func
    return hook
