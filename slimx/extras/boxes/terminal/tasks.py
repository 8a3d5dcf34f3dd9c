"""A task of a terminal: what its box begins with, and the tests that judge the work.

A row of a prompt file, for `rollout.map: terminal`:

{"prompt": "median() is wrong for lists of even length. Repair it.",
 "files": "median/files", "root": "python.tar", "image": null, "directory": "/repo", "kept": ["tests/*"],
 "tests": {"command": ["python3", "-m", "unittest", "-q"], "files": "median/tests", "seconds": 60, "expect": ["OK"]}}

Only `prompt` and `tests.command` must be there; the paths begin at the option `tasks` of the toolbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.boxes.conversion import place_of

KEY = "task"
"""Key of a prompt's metadata under which its task is kept."""
Text = Annotated[str, Meta(min_length=1)]


class Checks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tests of a task."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Program with its arguments, run in the task's `directory`."""
    files: Path | None = None
    """Directory whose content is put into `directory` before they run; the model never sees it."""
    seconds: Annotated[float, Meta(gt=0)] = 60.0
    expect: tuple[re.Pattern[str], ...] | None = ()
    """Expressions that their output must have, besides status 0; `^` and `$` match at line ends."""


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task; its paths are those of this machine."""

    tests: Checks
    directory: Text = "/repo"
    """The model's working directory in the box; what lies in it is judged."""
    root: Path | None = None
    """Archive or directory that the box begins with; with neither it nor an image, with an empty root."""
    image: Text | None = None
    """Image that the box begins with, instead of a root."""
    files: Path | None = None
    """Directory whose content lies in `directory` from the start."""
    kept: tuple[str, ...] = ()
    """Patterns of files below `directory` that are judged as they were at the start."""

    @classmethod
    def of(cls, prompt: Prompt, base: Path) -> Task:
        """The task of a prompt, with paths from `base` on. Raises SlimxError naming the prompt."""
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
                raise _refusal(f"there is no root {task.root}", "root")
            for name, path in (("files", task.files), ("tests.files", task.tests.files)):
                if path is not None and not path.is_dir():
                    raise _refusal(f"there is no directory {path}", name)
        except SlimxError as error:
            raise SlimxError(f"prompt {prompt.id!r}: {error}", code=error.code, about=prompt.id) from error
        return task


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a row, with its task in the metadata: for `rollout.map`. Raises SlimxError for a bad task."""
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise _refusal("give the text that the model reads", "prompt")
    task = {name: value for name, value in row.items() if name not in ("id", "prompt", "metadata")}
    _read(task, Path())
    named = {"id": str(row["id"])} if "id" in row else {}
    metadata = {**(row.get("metadata") or {}), KEY: task}
    return {"messages": [{"role": "user", "content": row["prompt"]}], "metadata": metadata, **named}


def _read(row: Any, base: Path) -> Task:
    def read(kind: Any, text: Any) -> Any:
        if not isinstance(text, str) or not text:
            raise ValueError("give a text")
        if kind is Path:
            return base / text
        try:
            return re.compile(text, re.MULTILINE)
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression ({error})") from error

    present = {name: value for name, value in row.items() if value is not None} if isinstance(row, Mapping) else row
    try:
        task = msgspec.convert(present, Task, dec_hook=read)
    except msgspec.ValidationError as error:
        name, what = place_of(error)
        raise _refusal(what, name or KEY) from error
    if task.root is not None and task.image is not None:
        raise _refusal("give a root or an image, not both", "image")
    names = task.directory.strip("/").split("/")
    if not task.directory.startswith("/") or not all(names) or {".", ".."} & {*names}:
        raise _refusal(f"{task.directory!r} is no absolute path below /", "directory")
    return task


def _refusal(what: str, name: str) -> SlimxError:
    return SlimxError(f"{name} of a task: {what}", code="task.row", about=name)
