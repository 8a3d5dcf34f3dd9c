"""The interface of a box: a root directory of its own, in which programs run one after the other."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slimx.errors import SlimxError
from slimx.extras.boxes.programs.enclosure import Ran
from slimx.extras.boxes.programs.watch import Limits

MAX_WORD, MAX_WORDS = 2**17 - 1, 2**20
"""Bytes of a word of a command, for which Linux allows no more, and of the whole command."""


class BoxRefusal(SlimxError):
    """Raised where a path in a box, or its image, is not what it must be. `about`: the path."""

    def __init__(self, text: str, *, code: str, about: str):
        super().__init__(text, code=f"box.{code}", about=about)


class BoxLost(SlimxError):
    """Raised where a box, or what it runs on, has gone or does not answer. `about`: container, engine or server."""

    def __init__(self, text: str, *, about: str):
        super().__init__(text, code="box.lost", about=about)


class BoxBusy(SlimxError):
    """Raised where a server of boxes had none to give until the deadline. `about`: the server."""

    def __init__(self, text: str, *, about: str):
        super().__init__(text, code="box.busy", about=about)


class Box(ABC):
    """One per rollout; its files stay from one program to the next, its processes do not. Calls block and take turns:
    make them by `slimx.extras.boxes.programs.enclosure.in_thread`. Any call may raise BoxLost."""

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits or Limits()
        self._turn, self._given_up = threading.Lock(), threading.Event()

    @contextmanager
    def _living(self) -> Iterator[None]:
        """Take a turn. Raises BoxRefusal if the box has ended."""
        with self._turn:
            if self._given_up.is_set():
                raise BoxRefusal("the box has ended; begin another one", code="ended", about="box")
            yield

    @abstractmethod
    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> Ran:
        """Run a program within the box's limits; everything that it started has ended when this returns. `cwd`: the
        directory in the box that it begins in. `stop`: ends it."""

    @abstractmethod
    def put(self, path: str, content: bytes) -> None:
        """Write a file, and the directories above it where they are missing. Raises BoxRefusal for a link, or
        something else that is no plain file, in the way."""

    @abstractmethod
    def get(self, path: str, most: int) -> bytes:
        """Read a file of up to `most` bytes. Raises BoxRefusal for anything else."""

    @abstractmethod
    def snapshot(self, to: Path) -> None:
        """Copy the root to the directory `to`, which must not exist; another box can begin from it."""

    def end(self) -> None:
        """End what runs and remove the root; a second call does nothing."""
        self._given_up.set()
        with self._turn:
            self._end()

    @abstractmethod
    def _end(self) -> None:
        """Do it, in turn."""


def names_of(path: str) -> list[str]:
    """The names that an absolute path of a file in a box goes through. Raises BoxRefusal for another path."""
    names = [name for name in path.split("/") if name]
    if not path.startswith("/") or not names or {".", ".."} & {*names} or "\0" in path:
        raise BoxRefusal(f"{path!r} is no absolute path of a file in a box", code="path", about=path)
    return names


def check_run(command: Sequence[str], stdin: str, cwd: str) -> None:
    """Raises BoxRefusal for what no program can be started with: a NUL or half a surrogate pair, or too many bytes."""
    try:
        words = [word.encode() for word in (*command, cwd)]
        stdin.encode()
    except UnicodeEncodeError as error:
        raise BoxRefusal(
            f"a command has half a surrogate pair ({error}); send text", code="command", about=""
        ) from None
    if any(b"\0" in word for word in words):
        raise BoxRefusal("a command or its directory has a NUL; leave it out", code="command", about=command[0])
    if max(map(len, words)) > MAX_WORD or sum(map(len, words)) > MAX_WORDS:
        raise BoxRefusal(
            f"a command has words of {MAX_WORD} bytes and {MAX_WORDS} in all at most; put more into a file",
            code="command",
            about=command[0][:100],
        )


def not_plain(path: str, reason: str) -> BoxRefusal:
    """The refusal of what is no plain file, or is reached over a link."""
    return BoxRefusal(
        f"{path} in the box is no file reached without links ({reason}); name a plain file", code="file", about=path
    )


def too_large(path: str, size: str, most: int) -> BoxRefusal:
    """The refusal of a file of `size`, in words, to be read up to `most` bytes."""
    return BoxRefusal(
        f"{path} in the box has {size} bytes, and {most} are allowed; keep it smaller", code="large", about=path
    )


class Either(threading.Event):
    """Set if it or one of two other events is."""

    def __init__(self, first: threading.Event, second: threading.Event | None):
        super().__init__()
        self._others = [each for each in (first, second) if each is not None]

    def is_set(self) -> bool:
        return super().is_set() or any(each.is_set() for each in self._others)
