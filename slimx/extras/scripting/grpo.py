"""`slimx.grpo`: trains with the values that `slimx init` chooses for the model, the prompts and this machine."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import SupportsIndex

from rich.console import Console

from slimx.config.load import Overrides, load_config, set_values
from slimx.config.schema import Config
from slimx.config.suggestions import for_flag
from slimx.digest import fingerprint
from slimx.durable import replace_synced
from slimx.errors import SlimxError, safe_repr
from slimx.extras.init.machine import target
from slimx.extras.init.prompts import Prompts as Found
from slimx.extras.init.prompts import columns_of, examine
from slimx.extras.init.run import Wishes, checked_file, settings_of
from slimx.extras.init.settings import Setting, values_of
from slimx.extras.scripting.alone import alone
from slimx.extras.scripting.functions import Hook, with_hooks
from slimx.extras.scripting.result import RunResult
from slimx.extras.scripting.rows import Rows
from slimx.extras.scripting.training import standard_output, train
from slimx.json_types import Json
from slimx.observability.live.run_lock import LOCK, check_usable, locked
from slimx.observability.live.safe_text import plain
from slimx.orchestration.start.checks import check_state, check_training
from slimx.orchestration.state.directory import finished, logs_in, resume_point
from slimx.orchestration.state.saves import Saves

NAMES = {"prompts": "prompts.jsonl", "eval": "heldout.jsonl"}
"""Names of files with rows, by the argument that passes them."""
ROWS = "rows"
"""Directory in the run's directory that contains these files."""
DIGITS = 16
"""Number of digits of a digest of rows."""
FILE = "grpo.yaml"
"""File in the run's directory with the settings that `grpo` has chosen and their comments."""
TITLE = "A run of slimx.grpo. Copy this file to change it, and start it with slimx train or slimx.train."
CHOSEN = "chosen by the script"
"""Comment of a value that the script has set."""

ARGUMENTS = {
    **dict.fromkeys(("reward_funcs", "reward_func", "reward_fn", "reward_function", "rewards"), "reward"),
    **dict.fromkeys(("train_dataset", "dataset", "train_data", "data"), "prompts"),
    **dict.fromkeys(("eval_dataset", "eval_data", "eval_prompts"), "eval"),
    **dict.fromkeys(("max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("output_dir", "run_dir"), "directory"),
    **dict.fromkeys(("args", "config"), "overrides"),
}
"""Arguments of `grpo`, by names that other trainers give them."""
METADATA = ("dataset", "images", "margin", "rejected")
"""Entries of metadata that have a meaning for slimx, so that columns of these names are not copied."""

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
    the keys of a prompt (docs/data.md) or columns such as prompt and answer, and any others for the reward. `reward`:
    hook as for `slimx.train`; None: a built-in reward that can grade the answers. `unknown`: arguments of other
    frameworks, which are refused with the key or argument to use instead. `directory`: the run's directory, in which a
    run continues; None: a new one, runs/grpo or runs/grpo-N. `overrides`, `generate`, `keep`, `console`: as for
    `slimx.train`. Raises SlimxError for a model that does not fit, and the errors of `slimx.train`."""
    for name, value in unknown.items():
        raise _unknown(name, value)
    if not isinstance(steps, SupportsIndex) or operator.index(steps) < 1:
        raise SlimxError(
            f"steps is {safe_repr(steps)}; pass a positive whole number", code="script.steps", about="steps"
        )
    console = console or standard_output()
    console.print(plain(f"checking {model} and its prompts"))
    path = None if directory is None else Path(directory).expanduser()
    with alone(), _claimed(path) as chosen, _undone(chosen) as undo:
        check_usable(chosen)
        found = _examined(_file(prompts, "prompts", chosen, undo), model, reward)
        evaluated = None
        if eval is not None:
            evaluated = _examined(_file(eval, "eval", chosen, undo), model, reward)
        if reward is None and found.reward is None:
            raise SlimxError(
                f"no built-in reward can grade the answers, because {found.why}; pass reward=",
                code="script.reward",
                about="reward",
            )
        wishes = Wishes(
            model=str(model),
            eval=evaluated,
            reward=found.reward or "exact",
            why=found.why,
            algorithm="grpo",
            steps=operator.index(steps),
            max_tokens=None,
            directory=str(chosen),
        )
        settings = settings_of(wishes, found, target(None, None, None))
        config = load_config(values_of(settings), overrides)
        if Path(config.run.dir) != chosen:
            raise SlimxError(
                f"overrides sets run.dir to {config.run.dir}; pass directory= instead",
                code="script.directory",
                about="run.dir",
            )
        config = with_hooks(config, generate=generate, reward=reward, keep=keep)
        text = checked_file(_final(settings, config), TITLE, str(chosen / FILE))
        check_training(config)
        done = _finished(config)
        if not done:
            with locked(chosen):
                _write(chosen / FILE, text.encode(), undo)
            console.print(plain(f"settings {chosen / FILE}"))
        result = train(config, console=console)
        if done:  # nothing was trained on new rows
            undo.close()
        return result


def _unknown(name: str, value: object) -> SlimxError:
    """Returns the error for an argument that `grpo` does not have, such as one of TRL's trainer."""
    hint = "see help(slimx.grpo)"
    if name in ARGUMENTS:
        hint = f"pass {ARGUMENTS[name]}= instead"
    else:
        key = for_flag(Config, f"--{name}", json.dumps(value, default=str))
        if key is not None:
            hint = f"in overrides=, {key}" if key.startswith("write ") else key
    return SlimxError(f"slimx.grpo has no argument {name}; {hint}", code="script.argument", about=name)


def _examined(file: str, model: str | os.PathLike[str], reward: Hook | None) -> Found:
    """Returns the findings about a prompt file. A reward of the script gets all columns as metadata of the prompts."""
    found = examine(file, str(model))
    if reward is None or found.fields is None:
        return found
    columns = [name for name in columns_of(file) if name not in (found.fields["prompt"], "answer", *METADATA)]
    if columns:
        found = replace(found, fields={**found.fields, "metadata": columns})
    return found


def _finished(config: Config) -> bool:
    """Returns True if the run in the directory of `config` has completed all steps."""
    directory = Path(config.run.dir)
    saves = Saves(directory / "checkpoints", keep=config.checkpoint.keep)
    found: list[bool] = []
    check_state(resume_point(config, directory, saves), lambda state: found.append(finished(config, directory, state)))
    return any(found)


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


def _file(prompts: Prompts, argument: str, directory: Path, undo: ExitStack) -> str:
    """Returns the path of a file with `prompts`: theirs, or one with the rows in the run's directory. Its path contains
    a digest of the rows, so that another call does not replace rows that a run reads. `argument`: name under which the
    prompts were passed. Raises SlimxError if a row cannot be written."""
    if isinstance(prompts, str | os.PathLike):
        return str(prompts)
    text = _lines(prompts, argument)
    file = directory / ROWS / fingerprint(text)[:DIGITS] / NAMES[argument]
    if not file.exists() or file.read_bytes() != text:  # an edited file, too
        _write(file, text, undo)
    return str(file)


def _write(file: Path, text: bytes, undo: ExitStack) -> None:
    """Writes a file, and adds the call that restores or removes it to `undo`."""
    if file.exists():
        undo.callback(replace_synced, file, file.read_bytes())
    else:
        undo.callback(_remove, file)
        file.parent.mkdir(parents=True, exist_ok=True)
    replace_synced(file, text)


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    with suppress(OSError):  # other files are in the directory
        for folder in file.parents[:2]:
            folder.rmdir()


def _lines(rows: Iterable[Mapping[str, object] | str], argument: str) -> bytes:
    """Returns `rows` as JSON lines in UTF-8. Raises SlimxError if one cannot be written."""
    # The entries of a pandas.DataFrame are names of its columns, those of a DatasetDict names of its splits.
    columnar = isinstance(rows, Mapping) or hasattr(rows, "columns") and not isinstance(rows, Rows)
    if columnar or not isinstance(rows, Iterable):
        raise SlimxError(
            f"{argument} is of type {type(rows).__name__}, whose entries are not rows; pass a list of dicts, such as "
            "frame.to_dict('records') or one split of a data set, or the path of a file",
            code="script.prompts",
            about=argument,
        )
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, str | Mapping):
            raise SlimxError(
                f"{argument}: entry {number} is of type {type(row).__name__}; "
                'pass dicts such as {"prompt": ..., "answer": ...}, texts, or the path of a file',
                code="script.prompts",
                about=argument,
            )
        values = {"prompt": row} if isinstance(row, str) else dict(row)
        try:
            lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        except (TypeError, ValueError) as error:
            raise SlimxError(
                f"{argument}: entry {number} cannot be written as JSON ({error}); keep texts, numbers and lists",
                code="script.prompts",
                about=argument,
            ) from None
    if not lines:
        raise SlimxError(f"{argument} is empty; pass at least one row", code="prompts.empty", about=argument)
    return b"".join(lines)


@contextmanager
def _claimed(directory: Path | None) -> Iterator[Path]:
    """Yields `directory`, or for None the first of runs/grpo, runs/grpo-2 and so on that does not exist. Creates it,
    so that no other process gets it, and removes it if the `with` block fails and has left nothing in it. Raises
    SlimxError if it cannot be created."""
    path = directory or Path("runs/grpo")
    number = 1
    while True:
        try:
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=directory is not None)
            break
        except OSError as error:
            if directory is not None or not isinstance(error, FileExistsError):
                raise SlimxError(
                    f"{path} cannot be created ({error.strerror}); set directory to one that you may write",
                    code="script.directory",
                    about=str(path),
                ) from error
        number += 1
        path = Path(f"runs/grpo-{number}")
    try:
        yield path
    except BaseException:
        with suppress(OSError):  # other files are in the directory
            for folder in missing:
                folder.rmdir()
        raise


@contextmanager
def _undone(directory: Path) -> Iterator[ExitStack]:
    """Yields a stack of calls that undo changes in the run's directory. They are made if the `with` block fails before
    any part of the run has written a log, except if another process has locked the directory. A lock file that was not
    there is removed, too."""
    logs = logs_in(directory)
    lock = directory / LOCK
    had_lock = lock.exists()
    undo = ExitStack()
    try:
        yield undo
    except BaseException as error:
        if isinstance(error, SlimxError) and error.code == "run.locked":
            raise  # the other process may read these files, such as the same rows
        with suppress(SlimxError), locked(directory):
            if logs_in(directory) == logs:
                undo.close()
                if not had_lock:
                    lock.unlink()
        raise
