"""The interface of a box: a root directory of its own, in which programs run one after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from slimx.environments.enclosure import Ran
from slimx.errors import SlimxError


class BoxRefusal(SlimxError):
    """Raised where a path in a box, or its image, is not what it must be. `about`: the path."""

    def __init__(self, text: str, *, code: str, about: str):
        super().__init__(text, code=f"box.{code}", about=about)


class Box(Protocol):
    """One per rollout; its files stay from one program to the next, its processes do not. Calls block and take turns:
    make them by `slimx.environments.enclosure.in_thread`."""

    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> Ran:
        """Run a program within the box's limits; everything that it started has ended when this returns. `cwd`: the
        directory in the box that it begins in. `stop`: ends it."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """Write a file, and the directories above it where they are missing. Raises BoxRefusal for a link, or
        something else that is no plain file, in the way."""
        ...

    def get(self, path: str, most: int) -> bytes:
        """Read a file of up to `most` bytes. Raises BoxRefusal for anything else."""
        ...

    def snapshot(self, to: Path) -> None:
        """Copy the root to the directory `to`, which must not exist; another box can begin from it."""
        ...

    def end(self) -> None:
        """End what runs and remove the root; a second call does nothing."""
        ...
