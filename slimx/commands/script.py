"""Training and evaluation from a script or a notebook: `slimx.train(config, reward=my_reward)`.

Hooks can be passed as functions. The configuration stores such functions by their dotted paths, so that `config.yaml`,
reward processes and the rest of the code do not differ from those of an ordinary run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from slimx.commands import start
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.rollout.hook_loading import in_process
from slimx.rollout.hooks import Generate, Keep, Reward


def train(
    config: Config,
    *,
    generate: Generate | None = None,
    reward: Reward | None = None,
    keep: Keep | None = None,
    console: Console | None = None,
) -> Path:
    """Trains as `slimx train` does and returns the run's directory. Blocks, and must be called in the main thread.

    `generate`, `reward` and `keep`: functions that replace the hooks `rollout.generate`, `reward.function` and
    `rollout.filter`; they must be defined at the top level of a module. `console`: where progress is printed; None:
    standard output. Raises SlimxError if the run fails; after a signal, raises Preempted if the run has saved a
    checkpoint (SIGUSR1), and Interrupted otherwise."""
    config = with_hooks(config, generate=generate, reward=reward, keep=keep)
    with alone():
        directory, _ = start.train(config, console or Console(soft_wrap=True))
    return directory


def with_hooks(
    config: Config, *, generate: Generate | None = None, reward: Reward | None = None, keep: Keep | None = None
) -> Config:
    """Returns `config` with the dotted paths of the given functions as its hooks.

    Raises SlimxError if a function cannot be imported by its path, in this process or in the reward processes, or if
    `reward` is given although the configuration has reward.parts."""
    rollout: dict[str, str] = {}
    if generate is not None:
        rollout["generate"] = _path("generate", generate)
    if keep is not None:
        rollout["filter"] = _path("keep", keep)
    sections: dict[str, object] = {}
    if rollout:
        sections["rollout"] = config.rollout.model_copy(update=rollout)
    if reward is not None:
        if config.reward.parts:
            raise SlimxError(
                "the argument `reward` cannot be combined with reward.parts; omit `reward`, or remove reward.parts",
                code="script.reward_parts",
                about="reward.parts",
            )
        path = _path("reward", reward)
        if in_process(config.reward, reward) and not _has_file(reward.__module__):
            raise SlimxError(
                f"reward: {path} is defined in an interactive session, from which another process cannot import; "
                "move the function into a .py file, or set reward.isolation=thread",
                code="script.reward_process",
                about=path,
            )
        sections["reward"] = config.reward.model_copy(update={"function": path})
    return config.model_copy(update=sections)


def _path(argument: str, function: Generate | Reward | Keep) -> str:
    """Returns the dotted path of `function`. `argument`: name under which the function was passed, for errors. Raises
    SlimxError if the function is not at the top level of a module."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if module is None or name is None or getattr(sys.modules.get(module), name, None) is not function:
        raise SlimxError(
            f"{argument}: {name or function!r} is not defined at the top level of a module, so a run cannot import "
            "the function; define the function at the top level with `def`",
            code="script.hook",
            about=argument,
        )
    return f"{module}.{name}"


def _has_file(module: str) -> bool:
    return getattr(sys.modules[module], "__file__", None) is not None


@contextmanager
def alone() -> Iterator[None]:
    """Lets the `with` block run an event loop although one is already running, as in a notebook; the outer loop is
    paused meanwhile. Raises SlimxError in a worker process that imports the script."""
    if multiprocessing.parent_process() is not None:
        raise SlimxError(
            "a worker process imports this script and would start the run again; put the call that starts the run "
            'under `if __name__ == "__main__":`',
            code="script.main",
            about="__main__",
        )
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
