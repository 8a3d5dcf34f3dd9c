"""The interface of a rollout's sandbox (`Box`): a private root directory in which programs run one after the other."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slimx.errors import SlimxError
from slimx.extras.boxes.programs.enclosure import ProgramResult
from slimx.extras.boxes.programs.watch import Limits

MAX_WORD = 2**17 - 1
"""Maximum length of one command argument, in bytes; equal to Linux's limit."""
MAX_WORDS = 2**20
"""Maximum total length of a command and its arguments, in bytes."""


class BoxRefusal(SlimxError):
    """Raised if a sandbox cannot use an argument of a method call, a path, or its image. `about`: the argument, path or
    image."""

    def __init__(self, text: str, *, code: str, about: str):
        super().__init__(text, code=f"box.{code}", about=about)


class BoxLost(SlimxError):
    """Raised if a sandbox, its engine or its server has failed or does not respond.

    `about`: container, engine or URL of the server.
    """

    def __init__(self, text: str, *, about: str):
        super().__init__(text, code="box.lost", about=about)


class BoxBusy(SlimxError):
    """Raised if no sandbox of a server became free before the deadline. `about`: URL of the server."""

    def __init__(self, text: str, *, about: str):
        super().__init__(text, code="box.busy", about=about)


class Box(ABC):
    """Interface of a rollout's sandbox.

    Files persist from one program to the next; processes do not. Calls block and run one at a time, so they belong in
    `slimx.extras.boxes.programs.enclosure.in_thread`. Every call may raise BoxLost.
    """

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits or Limits()
        self._turn = threading.Lock()
        self._closing = threading.Event()

    @contextmanager
    def _living(self) -> Iterator[None]:
        """Waits for earlier calls of the sandbox's methods, and makes later ones wait until the end of the block.
        Raises BoxRefusal after `end`."""
        with self._turn:
            if self._closing.is_set():
                raise BoxRefusal("the sandbox has ended; create another sandbox", code="ended", about="box")
            yield

    @abstractmethod
    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> ProgramResult:
        """Runs a program within the sandbox's limits. None of its processes is left when this returns.

        `cwd`: working directory in the sandbox. `stop`: event that stops the program when set.
        """

    @abstractmethod
    def put(self, path: str, content: bytes) -> None:
        """Writes `content` to a file, and creates missing parent directories.

        Raises BoxRefusal if the path contains a link or is not a regular file.
        """

    @abstractmethod
    def get(self, path: str, most: int) -> bytes:
        """Returns the content of a regular file of up to `most` bytes. Raises BoxRefusal for anything else."""

    @abstractmethod
    def snapshot(self, to: Path) -> None:
        """Copies the root to the directory `to`, which must not exist. Another sandbox can start from the copy."""

    def end(self) -> None:
        """Stops the running program and removes the root. A second call does nothing."""
        self._closing.set()
        with self._turn:
            self._end()

    @abstractmethod
    def _end(self) -> None:
        """Removes the root while no other call runs. May be called again."""


def names_of(path: str) -> list[str]:
    """Returns the components of the absolute path of a file in a sandbox. Raises BoxRefusal for any other path."""
    names = [name for name in path.split("/") if name]
    if not path.startswith("/") or not names or {".", ".."} & {*names} or "\0" in path:
        raise BoxRefusal(
            f"{path!r} is not an absolute path of a file in the sandbox; use a path that starts with `/` and "
            "contains neither NUL characters nor the components `.` and `..`",
            code="path",
            about=path,
        )
    return names


def check_run(command: Sequence[str], stdin: str, cwd: str) -> None:
    """Raises BoxRefusal if `command` or `cwd` contains NUL, if one of them or `stdin` contains an unpaired surrogate,
    or if the command is too long."""
    try:
        words = [word.encode() for word in (*command, cwd)]
        stdin.encode()
    except UnicodeEncodeError as error:
        raise BoxRefusal(
            f"the {'standard input' if error.object == stdin else 'directory' if error.object == cwd else 'argument'} "
            f"{error.object[:80]!r} of a command contains an unpaired surrogate at index {error.start}; remove the "
            "surrogate, which UTF-8 cannot encode",
            code="command",
            about="",
        ) from None
    if any(b"\0" in word for word in words):
        place = "directory" if "\0" in cwd else "argument list"
        raise BoxRefusal(
            f"the {place} of the command {command[0][:80]!r} contains a NUL character; remove the character",
            code="command",
            about=command[0],
        )
    longest, total = max(map(len, words)), sum(map(len, words))
    if longest > MAX_WORD or total > MAX_WORDS:
        excess = f"an argument of {longest} bytes, but at most {MAX_WORD} bytes are allowed"
        if longest <= MAX_WORD:
            excess = f"{total} bytes of arguments, but at most {MAX_WORDS} bytes are allowed"
        raise BoxRefusal(
            f"the command {command[0][:80]!r} has {excess}; pass the data in a file instead",
            code="command",
            about=command[0][:100],
        )


def not_plain(path: str, reason: str) -> BoxRefusal:
    """Returns the error for a path that is not a regular file or contains a link."""
    return BoxRefusal(
        f"{path} in the sandbox cannot be accessed as a regular file ({reason}); use the path of a regular file, "
        "without links in the path",
        code="file",
        about=path,
    )


def too_large(path: str, size: str, most: int) -> BoxRefusal:
    """Returns the error for a file of more than `most` bytes. `size`: string that describes the size of the file."""
    return BoxRefusal(
        f"{path} in the sandbox has {size} bytes, but at most {most} bytes are allowed; make the file smaller",
        code="large",
        about=path,
    )


class Either(threading.Event):
    """Event that also counts as set when either of two other events is set."""

    def __init__(self, first: threading.Event, second: threading.Event | None):
        super().__init__()
        self._others = [first] if second is None else [first, second]

    def is_set(self) -> bool:
        return super().is_set() or any(other.is_set() for other in self._others)
