"""`slimx.grpo`: trains with the values that `slimx init` chooses for the model, the prompts and this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from slimx.config.load import Overrides, load_config, set_values
from slimx.config.schema import Config
from slimx.config.suggestions import for_flag
from slimx.durable import write_atomic
from slimx.errors import SlimxError
from slimx.extras.init.machine import target
from slimx.extras.init.prompts import examine
from slimx.extras.init.run import Wishes, checked_file, settings_of
from slimx.extras.init.settings import Setting, tree_of
from slimx.extras.scripting.functions import Hook, with_hooks
from slimx.extras.scripting.result import RunResult
from slimx.extras.scripting.training import standard_output, train
from slimx.json_types import Json
from slimx.observability.live.safe_text import plain

FILE = "grpo.yaml"
"""File in the run's directory with the settings that `grpo` has chosen and their comments."""
TITLE = "A run of slimx.grpo. Copy this file to change it, and start it with slimx train or slimx.train."
CHOSEN = "chosen by the script"
"""Comment of a value that the script has set."""

Prompts = str | os.PathLike[str] | Iterable[Mapping[str, object] | str]
"""A prompt file, or rows, such as a list of dicts or a `datasets.Dataset`."""


def grpo(
    model: str | os.PathLike[str],
    prompts: Prompts,
    reward: Hook | None = None,
    *,
    steps: int = 100,
    eval: Prompts | None = None,
    directory: str | os.PathLike[str] | None = None,
    overrides: Overrides = (),
    generate: Hook | None = None,
    keep: Hook | None = None,
    console: Console | None = None,
    **unknown: object,
) -> RunResult:
    """Trains a model by GRPO on this machine, its GPUs or its CPU, and returns the run. The other values are those that
    `slimx init` chooses; RUN/grpo.yaml contains them with comments.

    `model`: Hugging Face directory. `prompts`, `eval`: training and held-out prompts, as a file or as rows; rows have
    the keys of a prompt (docs/data.md) or columns such as prompt and answer. `reward`: hook as for `slimx.train`; None:
    a built-in reward that can grade the answers. `unknown`: arguments of other frameworks, which are refused with the
    key to set in `overrides`. `directory`: the run's directory, in which a run continues; None: a
    new one, runs/grpo or runs/grpo-N. `overrides`, `generate`, `keep`, `console`: as for `slimx.train`. Raises
    SlimxError for a model that does not fit, and the errors of `slimx.train`."""
    for name, value in unknown.items():
        hint = for_flag(Config, f"--{name}", json.dumps(value, default=str)) or "see help(slimx.grpo)"
        raise SlimxError(
            f"slimx.grpo has no argument {name}; in overrides=, {hint}", code="script.argument", about=name
        )
    chosen = _free() if directory is None else Path(directory).expanduser()
    console = console or standard_output()
    console.print(plain(f"checking {model} and its prompts"))
    with _cleared(chosen):
        config = _configured(str(model), prompts, reward, steps, eval, chosen, overrides, generate=generate, keep=keep)
        console.print(plain(f"settings {chosen / FILE}"))
        return train(config, console=console)


def _configured(
    model: str,
    prompts: Prompts,
    reward: Hook | None,
    steps: int,
    held_out: Prompts | None,
    directory: Path,
    overrides: Overrides,
    *,
    generate: Hook | None,
    keep: Hook | None,
) -> Config:
    """Returns the configuration of the run, after writing its file and the files of prompts that are rows."""
    found = examine(_file(prompts, directory / "prompts.jsonl", "prompts"), model)
    evaluated = None
    if held_out is not None:
        evaluated = examine(_file(held_out, directory / "heldout.jsonl", "eval"), model)
    grading = found.reward or ""
    if reward is None and not grading:
        raise SlimxError(
            f"no built-in reward can grade the answers, because {found.why}; pass reward=",
            code="script.reward",
            about="reward",
        )
    wishes = Wishes(
        model=model,
        eval=evaluated,
        reward=grading or "exact",
        why=found.why,
        algorithm="grpo",
        steps=steps,
        max_tokens=None,
        directory=str(directory),
    )
    settings = settings_of(wishes, found, target(None, None, None))
    config = with_hooks(load_config(tree_of(settings), overrides), generate=generate, reward=reward, keep=keep)
    file = directory / FILE
    text = checked_file([*_final(settings, config)], TITLE, str(file))
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text.encode())
    return config


def _final(settings: Sequence[Setting], config: Config) -> Iterator[Setting]:
    """Yields `settings` with their values in `config`, which the script may have changed, followed by the other values
    that the script has set."""
    values = dict(_leaves(set_values(config), {setting.key for setting in settings}))
    for setting in settings:
        value = values.pop(setting.key, setting.value)
        yield setting if value == setting.value else Setting(setting.key, value, CHOSEN)
    for key, value in values.items():
        yield Setting(key, value, CHOSEN)


def _leaves(values: Json, keys: Collection[str], above: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted keys and values of the nested mapping `values`. A mapping is one value if its key is in `keys`,
    or if no key in `keys` is below it."""
    for name, value in values.items():
        key = above + name
        if isinstance(value, dict) and any(other.startswith(f"{key}.") for other in keys):
            yield from _leaves(value, keys, f"{key}.")
        else:
            yield key, value


def _file(prompts: Prompts, file: Path, argument: str) -> str:
    """Returns the path of a file with `prompts`: theirs, or `file`, into which rows are written. Raises SlimxError if a
    row cannot be written."""
    if isinstance(prompts, str | os.PathLike):
        return str(prompts)
    lines = []
    for number, row in enumerate(prompts):
        if not isinstance(row, str | Mapping):
            raise SlimxError(
                f"{argument}: entry {number} is of type {type(row).__name__}; pass dicts such as "
                '{"prompt": ..., "answer": ...}, texts, or the path of a file',
                code="script.prompts",
                about=argument,
            )
        values = {"prompt": row} if isinstance(row, str) else dict(row)
        try:
            lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise SlimxError(
                f"{argument}: entry {number} cannot be written as JSON ({error}); keep texts, numbers and lists",
                code="script.prompts",
                about=argument,
            ) from None
    if not lines:
        raise SlimxError(f"{argument} is empty; pass at least one row", code="prompts.empty", about=argument)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, "".join(f"{line}\n" for line in lines).encode())
    return str(file)


def _free() -> Path:
    """Returns the first of runs/grpo, runs/grpo-2 and so on that does not exist."""
    path = Path("runs/grpo")
    number = 1
    while path.exists():
        number += 1
        path = Path(f"runs/grpo-{number}")
    return path


@contextmanager
def _cleared(directory: Path) -> Iterator[None]:
    """Removes the files that `grpo` has written into `directory` if the `with` block refuses a run that has not
    begun."""
    existed = directory.exists()
    try:
        yield
    except SlimxError:
        names = {"prompts.jsonl", "heldout.jsonl", FILE}
        if not existed and directory.exists() and {path.name for path in directory.iterdir()} <= names:
            for path in directory.iterdir():
                path.unlink()
            directory.rmdir()
        raise
