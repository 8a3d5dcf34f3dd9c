"""A terminal as tools: a shell and edits of files in a box of the rollout's own, and tests as its reward.

rollout:
  prompts: tasks.jsonl
  map: terminal
  generate: tools
  options:
    toolbox: terminal
    toolbox_options: {tasks: ., box: {backend: container, memory_mib: 2048, seconds: 120}}
    call_deadline: 300    # above the tests' seconds, the box's, and 10 (and patience, with a server)
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
from slimx.data.whole import Json
from slimx.errors import SlimxError
from slimx.extras.agents.toolbox import ToolResult, ToolsLost
from slimx.extras.boxes.choice import BoxOptions, merged
from slimx.extras.boxes.programs.enclosure import MIB, Ran, in_thread
from slimx.extras.boxes.protocol import Box, BoxBusy, BoxLost, BoxRefusal
from slimx.extras.boxes.remote import MAX_FILE
from slimx.extras.boxes.terminal.judging import NoVerdict, judged, packed, size_of_tests, verdict
from slimx.extras.boxes.terminal.tasks import Task

_NOTHING = bytes(2 * tarfile.BLOCKSIZE)
"""An archive without members."""
KEY = "rollout.options.toolbox_options"
MAX_READ = 2**20
"""Bytes of a file that is read or edited."""

COPY_S = 10.0
"""Seconds that a deadline must leave for copying files, besides waiting for a box and running programs."""
MOST = {"command": 100_000, "path": 2048}
"""Bytes of arguments that are given to a program, for which Linux allows 128 KiB, and in a URL."""


class Terminal:
    """One box with the tools shell, read_file, write_file and edit_file, judged by the task's tests."""

    def __init__(self, *, box: Json | None = None, tasks: str = ".", work_mib: float = 48.0) -> None:
        """`box`: options of the boxes (`slimx.extras.boxes.choice`). `tasks`: directory that the paths of tasks
        begin at. `work_mib`: MiB of the model's files and kept ones that the tests get at most; with more it has
        failed."""
        self._options = BoxOptions.read(box or {}, f"{KEY}.box")
        self._base, self._most = Path(tasks), int(work_mib * MIB)
        self._box: Box | None = None
        self._task: Task | None = None
        self.unjudged: str | None = None
        """Why what the model left got no verdict of the tests, and failed."""

    @classmethod
    def check(cls, **options: Any) -> None:
        """Refuse options that cannot work, and a back end that does not answer (SlimxError). Removes what boxes of
        killed runs have left."""
        made = cls(**options)
        if not made._base.is_dir():
            raise SlimxError(f"{KEY}.tasks: there is no directory {made._base}", code="task.base", about=f"{KEY}.tasks")
        if made._options.backend == "remote":
            if made._most > MAX_FILE:
                raise SlimxError(
                    f"{KEY}.work_mib: a server of boxes gives away {MAX_FILE // MIB} MiB at once; ask for no more",
                    code="box.option",
                    about=f"{KEY}.work_mib",
                )
            made._options.server().check()
        made._options.sweep()

    @classmethod
    def needs_seconds(cls, prompts: Iterable[Prompt], **options: Any) -> tuple[float, float]:
        """Seconds that opening, and the longest judgement of these prompts, may take when nothing is wrong."""
        made = cls(**options)
        waits = made._options.patience if made._options.backend == "remote" else 0.0
        tests = max((Task.of(prompt, made._base).tests.seconds for prompt in prompts), default=0.0)
        return waits + COPY_S, waits + made._options.limits.seconds + tests + COPY_S

    @classmethod
    def check_prompts(cls, prompts: Iterable[Prompt], **options: Any) -> None:
        """Refuse a prompt whose task cannot begin, naming it; the first one's box is begun, tried and ended."""
        made, known = cls(**options), {None}
        for number, prompt in enumerate(prompts):
            task = Task.of(prompt, made._base)
            source = task.image or task.root
            try:
                if source not in known:
                    made._options.check_source(source)
                made._check_size(task)
                if number == 0:
                    made._try(task)
            except SlimxError as error:
                raise SlimxError(f"prompt {prompt.id!r}: {error}", code=error.code, about=prompt.id) from error
            known.add(source)

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        """Begin the task's box. Raises ToolsLost, and SlimxError for a prompt without a task."""
        self._task = Task.of(prompt, self._base)
        task = self._task

        def begin(stop: threading.Event) -> None:
            self._box = box = self._begin(task)
            if stop.is_set():  # nobody closes it any more
                box.end()

        await self._in_thread(begin)
        return [_shown(name, task.directory) for name in _TOOLS]

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run a command, or read, write or edit a file. Raises ToolsLost."""
        wanted = _TOOLS[name][1]
        if {*arguments} != {*wanted} or not all(isinstance(value, str) for value in arguments.values()):
            text = f"{name} takes the texts {', '.join(wanted)}, and nothing else."
            return ToolResult(text=text, error="bad_arguments")
        for argument, value in arguments.items():
            if unfit := _unfit(argument, value):
                return ToolResult(text=unfit, error="bad_arguments")
        try:
            return await self._in_thread(lambda stop: self._call(name, arguments, stop))
        except BoxRefusal as error:
            return ToolResult(text=str(error), error=error.code.replace(".", "_"))

    async def judge(self, messages: Sequence[Json]) -> dict[str, float]:
        """{"tests": 1.0} if the task's tests pass in a fresh box, else 0.0. Raises ToolsLost."""
        return {"tests": float(await self._in_thread(self._passes))}

    async def close(self) -> None:
        """End the box."""
        box, self._box = self._box, None
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
            except BoxRefusal as error:  # the model's hands are not on this box
                raise ToolsLost(f"a fresh box does not take the tests: {error}", about=error.about) from error
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
            raise ToolsLost(f"kept files of a fresh box cannot be read: {error}", about=task.directory) from error

    def _check_size(self, task: Task) -> None:
        """Refuse tests that a server of boxes would not take together with the model's files."""
        most, tests = MAX_FILE - self._most, size_of_tests(task)
        if self._options.backend == "remote" and tests > most:
            raise SlimxError(
                f"{KEY}.work_mib: the tests have {tests} bytes, and a server of boxes takes {MAX_FILE // MIB} MiB with "
                "the model's files; lower it, or make the tests smaller",
                code="task.tests",
                about="tests.files",
            )

    def _try(self, task: Task) -> None:
        """Refuse a task in whose box no shell runs. It has the tests' time: a busy machine is slow."""
        box = self._begin(task, seconds=max(task.tests.seconds, self._options.limits.seconds))
        try:
            ran = box.run(["sh", "-c", "tar --help"], cwd=task.directory)
        finally:
            box.end()
        if not ran.ok:
            raise SlimxError(
                f"sh and tar do not run in {task.directory} of its box (sh {ran.ending}: "
                f"{ran.stderr.strip()[-300:]}); a root needs both, or host_usr",
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
            ran = self._box.run(["sh", "-c", arguments["command"]], cwd=self._task.directory, stop=stop)
            return ToolResult(text=_told(ran), error=None if ran.ended == "exit" else f"limit_{ran.ended}")
        path = posixpath.normpath(posixpath.join(self._task.directory, arguments["path"]))
        if name == "write_file":
            self._box.put(path, arguments["content"].encode())
            return ToolResult(text=f"Written: {path}")
        content = self._box.get(path, MAX_READ)
        if name == "read_file":
            return ToolResult(text=content.decode(errors="replace"))
        # As bytes: a file need not be UTF-8, and what is not replaced stays as it was.
        old, new = arguments["old"].encode(), arguments["new"].encode()
        found = content.count(old) if old else 0
        if found != 1:
            return ToolResult(text=f"{path} has the old text {found} times; give one that it has once.", error="edit")
        self._box.put(path, content.replace(old, new))
        return ToolResult(text=f"Edited: {path}")

    async def _in_thread[T](self, call: Callable[[threading.Event], T]) -> T:
        try:
            return await in_thread(call, waits=self._options.backend != "bubblewrap")
        except (BoxLost, BoxBusy) as error:
            raise ToolsLost(str(error), about=error.about) from error


def _unfit(name: str, value: str) -> str | None:
    """Say what keeps an argument from being given to a program; None for a good one."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return f"{name} has half a surrogate pair, which is no text."
    if name in MOST and "\0" in value:
        return f"{name} has a NUL character."
    if size > MOST.get(name, size):
        return f"{name} has {size} bytes, and {MOST[name]} are allowed."
    return None


def _told(ran: Ran) -> str:
    """The end of a command as the model reads it."""
    parts = [each.rstrip("\n") for each in (ran.stdout, ran.stderr) if each]
    if ran.ended != "exit":
        parts.append(f"(killed: over the limit of {ran.ended})")
    elif ran.status != 0:
        parts.append(f"(exit status {ran.status})")
    return "\n".join(parts) or "(no output)"


_TOOLS = {
    "shell": (
        "Run a command with sh in {directory}. "
        "Files stay for the next command; directory, variables and processes do not.",
        {"command": "The command."},
    ),
    "read_file": ("Read a text file.", {"path": "Path, from {directory} on."}),
    "write_file": (
        "Write a text file, and make its directories.",
        {"path": "Path, from {directory} on.", "content": "The whole text."},
    ),
    "edit_file": (
        "Replace a text that a file has exactly once.",
        {"path": "Path, from {directory} on.", "old": "The text to replace.", "new": "The text in its place."},
    ),
}
"""Description of each tool and of its arguments, which are texts and all required."""


def _shown(name: str, directory: str) -> Json:
    said, arguments = _TOOLS[name]
    properties = {
        each: {"type": "string", "description": what.format(directory=directory)} for each, what in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    function = {"name": name, "description": said.format(directory=directory), "parameters": parameters}
    return {"type": "function", "function": function}
