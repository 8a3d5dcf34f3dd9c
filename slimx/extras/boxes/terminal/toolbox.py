"""A terminal as tools: a shell and file edits in the rollout's sandbox, and the task's tests as the reward.

rollout:
  prompts: tasks.jsonl
  map: terminal
  generate: tools
  options:
    toolbox: terminal
    toolbox_options: {tasks: ., box: {backend: container, memory_mib: 2048, seconds: 120}}
    call_deadline: 300   # above the sum of tests.seconds, box.seconds and 10 (plus box.patience, with a server)
reward: {function: tools}
"""

from __future__ import annotations

import posixpath
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.agents.toolbox import ToolResult, ToolsLost
from slimx.extras.boxes.choice import BoxOptions, merged
from slimx.extras.boxes.programs.enclosure import MIB, ProgramResult, in_thread
from slimx.extras.boxes.protocol import Box, BoxBusy, BoxLost, BoxRefusal
from slimx.extras.boxes.remote import MAX_FILE
from slimx.extras.boxes.terminal.judging import NoVerdict, judged, packed, size_of_tests, verdict
from slimx.extras.boxes.terminal.tasks import Task
from slimx.json_types import Json

_NOTHING = bytes(2 * tarfile.BLOCKSIZE)
"""Tar archive without members."""
KEY = "rollout.options.toolbox_options"
MAX_READ = 2**20
"""Maximum size in bytes of a file that the model may read or edit."""

COPY_S = 10.0
"""Seconds that a deadline must allow for copying files, in addition to waiting for a sandbox and running programs."""
MOST = {"command": 100_000, "path": 2048}
"""Maximum length in bytes of an argument, by its name. Linux allows 128 KiB per command argument; a path must also fit
into a URL."""


class Terminal:
    """Toolbox of one sandbox with the tools shell, read_file, write_file and edit_file. Tests in a fresh sandbox decide
    the reward."""

    def __init__(self, *, box: Json | None = None, tasks: str = ".", work_mib: float = 48.0) -> None:
        """Reads the options without creating a sandbox.

        `box`: sandbox options (`slimx.extras.boxes.choice`). `tasks`: base directory of the paths in tasks. `work_mib`:
        maximum size in MiB of the model's files and kept files that are copied for the tests; exceeding it counts as
        failed tests.
        """
        self._options = BoxOptions.read(box or {}, f"{KEY}.box")
        self._base = Path(tasks)
        self._most = int(work_mib * MIB)
        self._box: Box | None = None
        self._task: Task | None = None
        self.unjudged: str | None = None
        """Reason why the tests count as failed although they did not run; None if they ran."""

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises SlimxError for unusable options or a backend that does not respond.

        Removes sandboxes that killed runs left behind.
        """
        toolbox = cls(**options)
        if not toolbox._base.is_dir():
            raise SlimxError(
                f"{KEY}.tasks is {toolbox._base}, which is not a directory; set {KEY}.tasks to the directory that "
                "contains the tasks",
                code="task.base",
                about=f"{KEY}.tasks",
            )
        if toolbox._options.backend == "remote":
            if toolbox._most > MAX_FILE:
                raise SlimxError(
                    f"{KEY}.work_mib={toolbox._most // MIB} exceeds the {MAX_FILE // MIB} MiB that a sandbox server "
                    f"accepts; lower {KEY}.work_mib to at most {MAX_FILE // MIB}",
                    code="box.option",
                    about=f"{KEY}.work_mib",
                )
            toolbox._options.server().check()
        toolbox._options.sweep()

    @classmethod
    def needs_seconds(cls, prompts: Iterable[Prompt], **options: Any) -> tuple[float, float]:
        """Returns the maximum times in seconds that `open` takes in normal operation and that `judge` takes for the
        prompt whose tests have the highest time limit."""
        toolbox = cls(**options)
        patience = toolbox._options.patience if toolbox._options.backend == "remote" else 0.0
        tests = max((Task.of(prompt, toolbox._base).tests.seconds for prompt in prompts), default=0.0)
        return patience + COPY_S, patience + toolbox._options.limits.seconds + tests + COPY_S

    @classmethod
    def check_prompts(cls, prompts: Iterable[Prompt], **options: Any) -> None:
        """Checks the tasks of all prompts; for the first one, also creates a sandbox, tries it and removes it.

        Raises SlimxError naming a prompt whose task cannot be started.
        """
        toolbox = cls(**options)
        checked: set[str | Path] = set()
        for index, prompt in enumerate(prompts):
            task = Task.of(prompt, toolbox._base)
            source = task.image or task.root
            try:
                if source is not None and source not in checked:
                    toolbox._options.check_source(source)
                    checked.add(source)
                toolbox._check_size(task)
                if index == 0:
                    toolbox._try(task)
            except SlimxError as error:
                raise SlimxError(f"prompt {prompt.id!r}: {error}", code=error.code, about=prompt.id) from error

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Creates the task's sandbox and returns the tools.

        Raises ToolsLost if the sandbox cannot be created, SlimxError for a prompt without a task.
        """
        task = Task.of(prompt, self._base)
        self._task = task

        def begin(stop: threading.Event) -> None:
            box = self._begin(task)
            self._box = box
            if stop.is_set():  # the call was cancelled, and `close` will not remove the sandbox
                box.end()

        await self._in_thread(begin)
        return [_description(name, task.directory) for name in _TOOLS]

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Runs a command, or reads, writes or edits a file. Raises ToolsLost if the sandbox has failed."""
        expected = _TOOLS[name][1]
        if {*arguments} != {*expected} or not all(isinstance(value, str) for value in arguments.values()):
            text = f"{name} takes exactly these strings: {', '.join(expected)}."
            return ToolResult(text=text, error="bad_arguments")
        for argument, value in arguments.items():
            problem = _unfit(argument, value)
            if problem is not None:
                return ToolResult(text=problem, error="bad_arguments")
        try:
            return await self._in_thread(lambda stop: self._call(name, arguments, stop))
        except BoxRefusal as error:
            return ToolResult(text=str(error), error=error.code.replace(".", "_"))

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """Returns {"tests": 1.0} if the task's tests pass in a fresh sandbox, otherwise {"tests": 0.0}.

        Raises ToolsLost if a sandbox fails.
        """
        return {"tests": float(await self._in_thread(self._passes))}

    async def close(self) -> None:
        """Removes the sandbox."""
        box = self._box
        self._box = None
        if box is not None:
            await self._in_thread(lambda stop: box.end())

    def _passes(self, stop: threading.Event) -> bool:
        assert self._box is not None and self._task is not None
        task = self._task
        try:
            left = packed(self._box, task.directory, self._most)
            fresh = self._begin(task, seconds=task.tests.seconds)
            try:
                archive = judged(left, self._as_it_began(fresh, task), task, self._most)
                return verdict(fresh, archive, task, stop)[0]
            except BoxRefusal as error:  # not caused by the model, which cannot access this sandbox
                raise ToolsLost(f"the tests cannot run in a fresh sandbox: {error}", about=error.about) from error
            finally:
                fresh.end()
        except NoVerdict as error:
            self.unjudged = str(error)
            return False

    def _as_it_began(self, fresh: Box, task: Task) -> bytes:
        if not task.kept:
            return _NOTHING
        try:
            return packed(fresh, task.directory, self._most)
        except NoVerdict as error:
            raise ToolsLost(
                f"the files that `kept` names cannot be read in a fresh sandbox: {error}", about=task.directory
            ) from error

    def _check_size(self, task: Task) -> None:
        """Raises SlimxError if the tests and the model's files together exceed the limit of a sandbox server."""
        tests = size_of_tests(task)
        if self._options.backend == "remote" and tests > MAX_FILE - self._most:
            raise SlimxError(
                f"the files of the task's tests ({tests} bytes) and {KEY}.work_mib ({self._most // MIB} MiB) together "
                f"exceed the {MAX_FILE // MIB} MiB that a sandbox server accepts; lower {KEY}.work_mib, or make the "
                "test files smaller",
                code="task.tests",
                about="tests.files",
            )

    def _try(self, task: Task) -> None:
        """Raises SlimxError unless both a shell and tar run in the task's sandbox.

        The trial's time limit is at least that of the tests, because a busy machine starts programs slowly.
        """
        box = self._begin(task, seconds=max(task.tests.seconds, self._options.limits.seconds))
        try:
            result = box.run(["sh", "-c", "tar --help"], cwd=task.directory)
        finally:
            box.end()
        if not result.ok:
            raise SlimxError(
                f"the test command `sh -c 'tar --help'` {result.ending} in {task.directory} of the task's sandbox "
                f"({result.stderr.strip()[-300:]}); use a root that contains sh and tar, or set host_usr to true",
                code="box.trial",
                about=task.directory,
            )

    def _begin(self, task: Task, seconds: float | None = None) -> Box:
        with self._source(task) as source:
            return self._options.make(source, seconds=seconds)

    @contextmanager
    def _source(self, task: Task) -> Iterator[str | Path]:
        if task.image is not None:
            yield task.image
            return
        if task.root is not None and task.files is None:
            yield task.root
            return
        with merged(task.root, task.files, task.directory, self._options.image_mib * MIB) as root:
            yield root

    def _call(self, name: str, arguments: Mapping[str, str], stop: threading.Event) -> ToolResult:
        assert self._box is not None and self._task is not None
        if name == "shell":
            result = self._box.run(["sh", "-c", arguments["command"]], cwd=self._task.directory, stop=stop)
            return ToolResult(text=_output(result), error=None if result.ended == "exit" else f"limit_{result.ended}")
        path = posixpath.normpath(posixpath.join(self._task.directory, arguments["path"]))
        if name == "write_file":
            self._box.put(path, arguments["content"].encode())
            return ToolResult(text=f"Written: {path}")
        content = self._box.get(path, MAX_READ)
        if name == "read_file":
            return ToolResult(text=content.decode(errors="replace"))
        # Edits bytes, because the file may not be UTF-8 and the rest of it must not change.
        old = arguments["old"].encode()
        new = arguments["new"].encode()
        count = content.count(old) if old else 0
        if count != 1:
            return ToolResult(
                text=f"The old text occurs {count} times in {path}. Give an old text that occurs exactly once.",
                error="edit",
            )
        self._box.put(path, content.replace(old, new))
        return ToolResult(text=f"Edited: {path}")

    async def _in_thread[T](self, call: Callable[[threading.Event], T]) -> T:
        try:
            return await in_thread(call, waits=self._options.backend != "bubblewrap")
        except (BoxLost, BoxBusy) as error:
            raise ToolsLost(str(error), about=error.about) from error


def _unfit(name: str, value: str) -> str | None:
    """Returns the reason why an argument cannot be passed to a program; None if it can."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return f"{name} contains an unpaired surrogate, which is not valid text."
    if name in MOST and "\0" in value:
        return f"{name} contains a NUL character."
    if size > MOST.get(name, size):
        return f"{name} has {size} bytes, but at most {MOST[name]} are allowed."
    return None


def _output(result: ProgramResult) -> str:
    """Returns a command's output and exit status as text for the model."""
    parts = [stream.rstrip("\n") for stream in (result.stdout, result.stderr) if stream]
    if result.ended != "exit":
        parts.append(f"(killed: over the limit of {result.ended})")
    elif result.status != 0:
        parts.append(f"(exit status {result.status})")
    return "\n".join(parts) or "(no output)"


_TOOLS = {
    "shell": (
        "Run a command with sh in {directory}. "
        "Files persist for the next command; the working directory, variables and processes do not.",
        {"command": "The command."},
    ),
    "read_file": ("Read a text file.", {"path": "Path, absolute or relative to {directory}."}),
    "write_file": (
        "Write a text file, and create missing parent directories.",
        {"path": "Path, absolute or relative to {directory}.", "content": "The whole text of the file."},
    ),
    "edit_file": (
        "Replace a text that occurs exactly once in a file.",
        {
            "path": "Path, absolute or relative to {directory}.",
            "old": "The text to replace.",
            "new": "The text that replaces it.",
        },
    ),
}
"""For each tool, its description and those of its arguments; all arguments are required strings."""


def _description(name: str, directory: str) -> Json:
    text, arguments = _TOOLS[name]
    properties = {
        argument: {"type": "string", "description": description.format(directory=directory)}
        for argument, description in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    function = {"name": name, "description": text.format(directory=directory), "parameters": parameters}
    return {"type": "function", "function": function}
