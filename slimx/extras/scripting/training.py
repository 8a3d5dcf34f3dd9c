"""Training from a script or a notebook: `slimx.train(source, reward=my_reward)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from slimx.commands import start
from slimx.config.load import Overrides, load_config
from slimx.config.schema import Config
from slimx.extras.scripting.alone import alone
from slimx.extras.scripting.functions import Hook, with_hooks
from slimx.extras.scripting.result import RunResult


def train(
    source: str | Path | Mapping[str, object] | Config,
    overrides: Overrides = (),
    *,
    generate: Hook | None = None,
    reward: Hook | None = None,
    keep: Hook | None = None,
    console: Console | None = None,
) -> RunResult:
    """Trains as `slimx train` does and returns the run, which is also the path of its directory. Blocks, and must be
    called in the main thread.

    `source`, `overrides`: a YAML file, a mapping or a configuration, with changes, as for `slimx.load_config`.
    `generate`, `reward` and `keep`: hooks in place of `rollout.generate`, `reward.function` and `rollout.filter`, as
    plain or async functions at the top level of a module or notebook, or as dotted paths. `console`: where progress is
    printed; None: standard output. Raises SlimxError if the run fails; after a signal, raises Preempted if the run has
    saved a checkpoint (SIGUSR1), and Interrupted otherwise."""
    config = with_hooks(configured(source, overrides), generate=generate, reward=reward, keep=keep)
    with alone():
        directory, report = start.train(config, console or standard_output())
    return RunResult(directory, report)


def standard_output() -> Console:
    """Returns a console that prints to standard output, in a notebook as lines of text, because a notebook cannot
    repaint a table."""
    console = Console(soft_wrap=True)
    if console.is_jupyter:
        console = Console(soft_wrap=True, force_jupyter=False, force_terminal=False)
    return console


def configured(source: str | Path | Mapping[str, object] | Config, overrides: Overrides = ()) -> Config:
    """Returns the configuration that `source` and `overrides` describe, as for `slimx.load_config`."""
    return source if isinstance(source, Config) and not overrides else load_config(source, overrides)
