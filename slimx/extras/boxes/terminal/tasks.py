"""A terminal task: the initial files of its sandbox, and the tests that decide the reward.

A row of a prompt file, for `rollout.map: terminal`:

    {"prompt": "median() is wrong for lists of even length. Repair it.", "files": "median/files",
     "root": "python.tar", "image": null, "directory": "/repo", "kept": ["tests/*"],
     "tests": {"command": ["python3", "-m", "unittest", "-q"], "files": "median/tests", "seconds": 60,
               "expect": ["OK"]}}

Only `prompt` and `tests.command` are required. Paths are relative to the option `tasks` of the toolbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.boxes.conversion import refused_field
from slimx.json_types import Json

KEY = "task"
"""Key under which a prompt's metadata contains the task."""
Text = Annotated[str, Meta(min_length=1)]


class Checks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tests that decide whether a task is solved."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Program with its arguments, run in the task's `directory`."""
    files: Path | None = None
    """Directory whose contents are copied into the task's `directory` before the tests run, unseen by the model; None
    for no files."""
    seconds: Annotated[float, Meta(gt=0)] = 60.0
    expect: tuple[re.Pattern[str], ...] | None = ()
    """Regular expressions that must match the tests' output for the tests to pass, in addition to an exit status of 0;
    `^` and `$` match at line ends. () or None: only the exit status counts."""


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Terminal task of one prompt; `root`, `files` and `tests.files` are paths on this machine."""

    tests: Checks
    directory: Text = "/repo"
    """The model's working directory in the sandbox; the tests run on its final contents."""
    root: Path | None = None
    """Archive or directory with the sandbox's initial root file system; None if the sandbox starts from an image or an
    empty root."""
    image: Text | None = None
    """Image from which the sandbox starts, instead of `root`; None for no image."""
    files: Path | None = None
    """Directory whose contents are copied into `directory` at the start; None for no files."""
    kept: tuple[str, ...] = ()
    """Glob patterns of the files in `directory` that are reset to their initial state before the tests."""

    @classmethod
    def of(cls, prompt: Prompt, base: Path) -> Task:
        """Returns the task of a prompt, with paths relative to `base`. Raises SlimxError, naming the prompt, for an
        invalid task."""
        row = prompt.metadata.get(KEY)
        if row is None:
            raise SlimxError(
                f"prompt {prompt.id!r} has no task in metadata.{KEY}; set rollout.map to {__name__}.to_prompt",
                code="task.row",
                about=prompt.id,
            )
        try:
            task = _read(row, base)
            if task.root is not None and not task.root.exists():
                raise _refusal(f"the root {task.root} does not exist; give an existing archive or directory", "root")
            for name, path in (("files", task.files), ("tests.files", task.tests.files)):
                if path is not None and not path.is_dir():
                    raise _refusal(f"the directory {path} does not exist; give an existing directory", name)
        except SlimxError as error:
            raise SlimxError(f"prompt {prompt.id!r}: {error}", code=error.code, about=prompt.id) from error
        return task


def to_prompt(row: Json) -> Json:
    """Converts a row of a prompt file to a prompt with the task in its metadata, for `rollout.map`.

    Raises SlimxError for an invalid task.
    """
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise _refusal("the text is missing, empty or not a string; set prompt to the text for the model", "prompt")
    task = {name: value for name, value in row.items() if name not in ("id", "prompt", "metadata")}
    _read(task, Path())
    metadata = {**(row.get("metadata") or {}), KEY: task}
    prompt: Json = {"messages": [{"role": "user", "content": row["prompt"]}], "metadata": metadata}
    if "id" in row:
        prompt["id"] = str(row["id"])
    return prompt


def _read(row: object, base: Path) -> Task:
    def read(kind: type, text: object) -> Path | re.Pattern[str]:
        if not isinstance(text, str) or not text:
            raise ValueError("use a non-empty string")
        if kind is Path:
            return base / text
        try:
            return re.compile(text, re.MULTILINE)
        except re.error as error:
            raise ValueError(f"{text!r} is not a valid regular expression ({error}); correct its syntax") from error

    if isinstance(row, Mapping):
        row = {name: value for name, value in row.items() if value is not None}
    try:
        task = msgspec.convert(row, Task, dec_hook=read)
    except msgspec.ValidationError as error:
        name, reason = refused_field(error)
        raise _refusal(reason, name or KEY) from error
    if task.root is not None and task.image is not None:
        raise _refusal("the task has both root and image; remove one of them", "image")
    names = task.directory.strip("/").split("/")
    if not task.directory.startswith("/") or not all(names) or {".", ".."} & {*names}:
        raise _refusal(
            f"{task.directory!r} is not an absolute path below /; use one without . and .., such as /work", "directory"
        )
    return task


def _refusal(reason: str, name: str) -> SlimxError:
    return SlimxError(f"{name} of a task: {reason}", code="task.row", about=name)
