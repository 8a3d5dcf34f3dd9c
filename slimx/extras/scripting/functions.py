"""Functions of a script as the hooks of a run.

The configuration names such functions by their dotted paths, so that `config.yaml`, reward processes and the rest of
slimx do not differ from those of an ordinary run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from slimx.config.schema import Config
from slimx.errors import SlimxError, safe_repr
from slimx.extras.scripting.trl import PREFIX, is_trl
from slimx.rollout.hook_loading import in_process

Hook = Callable[..., object] | str
"""A plain or async function, or its dotted path."""


def with_hooks(
    config: Config, *, generate: Hook | None = None, reward: Hook | None = None, keep: Hook | None = None
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
        if callable(reward):
            if in_process(config.reward, reward) and not _has_file(path):  # type: ignore[arg-type]
                raise SlimxError(
                    f"reward: {path} is defined in an interactive session, from which another process cannot import; "
                    "move the function into a .py file, or set reward.isolation=thread",
                    code="script.reward_process",
                    about=path,
                )
            if is_trl(reward):
                path = PREFIX + path
        sections["reward"] = config.reward.model_copy(update={"function": path})
    return config.model_copy(update=sections)


def _path(argument: str, function: Hook) -> str:
    """Returns the dotted path of `function`: its module, or that of the script, and the name that it has there.
    `argument`: name under which the function was passed, for errors. Raises SlimxError if it has none."""
    if isinstance(function, str) and function:
        return function
    if not callable(function):
        remedy = "pass a function, or its dotted path"
        if isinstance(function, list | tuple):
            remedy = "pass one function that adds their values, or name them in reward.parts"
        raise SlimxError(
            f"{argument} is {safe_repr(function)}, which is no function; {remedy}", code="script.hook", about=argument
        )
    for module in (str(getattr(function, "__module__", "")), "__main__"):
        named = getattr(sys.modules.get(module), "__dict__", {})
        names = [name for name, value in named.items() if value is function]
        if names:
            return f"{module}.{min(names, key=lambda name: name.startswith('_'))}"  # _ is the last value of a notebook
    raise SlimxError(
        f"{argument}: {getattr(function, '__qualname__', repr(function))} has no name at the top level of a module, so "
        "a run cannot import the function; define the function at the top level of the script or in a notebook cell "
        "with `def`",
        code="script.hook",
        about=argument,
    )


def _has_file(path: str) -> bool:
    """Returns True if the module of the function at the dotted path `path` was read from a file."""
    return getattr(sys.modules[path.rpartition(".")[0]], "__file__", None) is not None
