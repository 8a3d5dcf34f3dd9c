"""The progress bar of a conversion: bytes, bytes per second, time that is left."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bar:
    """A `slimx.convert.work.Progress` on a console; silent where that is no terminal."""

    def __init__(self, console: Console):
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        what = TextColumn("{task.description}")
        self._progress = Progress(what, *columns, console=console, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, what: str, total: int, done: int) -> None:
        """Begin; what an earlier try has done counts as done, not as fast."""
        self._task = self._progress.add_task(what, total=total)
        if done:
            self._progress.update(self._task, completed=done)
            self._progress.reset(self._task, completed=done)

    def advance(self, nbytes: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, nbytes)
