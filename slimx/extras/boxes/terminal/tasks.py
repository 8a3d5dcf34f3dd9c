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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimx.data.records import Prompt
from slimx.errors import SlimxError

KEY = "task"
"""Key of a prompt's metadata under which its task is kept."""
TEXTS, LISTS = ("files", "root", "image", "directory"), ("kept",)
TESTS = {"command", "files", "seconds", "expect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task; its paths are those of this machine."""

    command: tuple[str, ...]
    """Program of the tests with its arguments, run in `directory`."""
    directory: str = "/repo"
    """The model's working directory in the box; what lies in it is judged."""
    root: Path | None = None
    """Archive or directory that the box begins with; with neither it nor an image, with an empty root."""
    image: str | None = None
    """Image that the box begins with, instead of a root."""
    files: Path | None = None
    """Directory whose content lies in `directory` from the start."""
    kept: tuple[str, ...] = ()
    """Patterns of files below `directory` that are judged as they were at the start."""
    tests: Path | None = None
    """Directory whose content is put into `directory` before the tests run; the model never sees it."""
    seconds: float = 60.0
    """For the tests."""
    expect: tuple[str, ...] = ()
    """Regular expressions that the output of the tests must have, besides status 0; `^` and `$` match at line ends."""

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
            _check(row)
            return cls._read(row, base)
        except SlimxError as error:
            raise SlimxError(f"prompt {prompt.id!r}: {error}", code=error.code, about=prompt.id) from error

    @classmethod
    def _read(cls, row: Mapping[str, Any], base: Path) -> Task:
        tests = row["tests"]
        paths = {name: row.get(name) for name in ("root", "files")} | {"tests": tests.get("files")}
        found = {name: base / value for name, value in paths.items() if value is not None}
        for name, path in found.items():
            if not (path.exists() if name == "root" else path.is_dir()):
                raise _refusal(f"there is no {'root' if name == 'root' else 'directory'} {path}", name)
        return cls(
            command=tuple(tests["command"]),
            directory=row.get("directory") or "/repo",
            image=row.get("image"),
            kept=tuple(row.get("kept") or ()),
            seconds=float(tests.get("seconds") or 60.0),
            expect=tuple(tests.get("expect") or ()),
            **found,
        )


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a row, with its task in the metadata: for `rollout.map`. Raises SlimxError for a bad task."""
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise _refusal("give the text that the model reads", "prompt")
    task = {name: value for name, value in row.items() if name not in ("id", "prompt", "metadata")}
    _check(task)
    named = {"id": str(row["id"])} if "id" in row else {}
    metadata = {**(row.get("metadata") or {}), KEY: task}
    return {"messages": [{"role": "user", "content": row["prompt"]}], "metadata": metadata, **named}


def _check(row: Any) -> None:
    if not isinstance(row, Mapping) or (unknown := sorted({*row} - {*TEXTS, *LISTS, "tests"})):
        what = "a task is an object" if not isinstance(row, Mapping) else f"a task has no {unknown[0]}"
        raise _refusal(f"{what}; its keys are {', '.join((*TEXTS, *LISTS, 'tests'))}", KEY)
    for name in TEXTS:
        if row.get(name) is not None and not (isinstance(row[name], str) and row[name]):
            raise _refusal("give a text", name)
    for name in LISTS:
        _texts(row.get(name) or [], name)
    if row.get("root") is not None and row.get("image") is not None:
        raise _refusal("give a root or an image, not both", "image")
    directory = row.get("directory") or "/repo"
    names = directory.strip("/").split("/")
    if not directory.startswith("/") or not all(names) or {".", ".."} & {*names}:
        raise _refusal(f"{directory!r} is no absolute path below /", "directory")
    tests = row.get("tests")
    if not isinstance(tests, Mapping) or (strange := sorted({*tests} - TESTS)):
        what = "give an object" if not isinstance(tests, Mapping) else f"tests have no {strange[0]}"
        raise _refusal(f"{what} with {', '.join(sorted(TESTS))}", "tests")
    if not _texts(tests.get("command"), "tests.command"):
        raise _refusal("name a program", "tests.command")
    seconds = tests.get("seconds", 60.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise _refusal(f"{seconds!r} is no number of seconds above 0", "tests.seconds")
    for pattern in _texts(tests.get("expect") or [], "tests.expect"):
        try:
            re.compile(pattern)
        except re.error as error:
            raise _refusal(f"{pattern!r} is no regular expression ({error})", "tests.expect") from error
    if (files := tests.get("files")) is not None and not isinstance(files, str):
        raise _refusal("give the path of a directory", "tests.files")


def _texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _refusal("give a list of texts", name)
    return value


def _refusal(what: str, name: str) -> SlimxError:
    return SlimxError(f"{name} of a task: {what}", code="task.row", about=name)
