"""Writes the files of a conversion: in parallel, resumable after a kill, checked, all or nothing.

A file is planned before anything is written, and its bytes depend on the plan alone. So a conversion that was killed
gives the same bytes as one that was not. Where they are written: `slimx.extras.convert.partial`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash

from slimx.digest import FileRecord, record
from slimx.errors import SlimxError
from slimx.extras.convert.partial import Done, Partial
from slimx.extras.convert.sources import Advance

_SPARE_BYTES = 64 * 2**20
"""Beyond the planned tensors: headers, metadata, tokenizer."""


class PlannedFile(Protocol):
    """A file of the output."""

    name: str
    """Path relative to the output."""
    nbytes: int
    """Bytes of its tensors."""

    def write(self, stream: Stream) -> Any:
        """Write it; what is returned goes, as JSON, to the conversion's `finish`."""
        ...


class Conversion(Protocol):
    """A planned conversion: the files that it writes, and how its output is compared with its source."""

    files: Sequence[PlannedFile]
    fingerprint: str
    """Differs between conversions whose files differ."""

    @property
    def small(self) -> Sequence[str]:
        """Names of the files that `finish` adds."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Holds while files are written."""
        ...

    def finish(self, directory: Path, notes: Mapping[str, Any]) -> None:
        """Add the small files that complete the output; `notes` by file name."""
        ...

    def compare(self, directory: Path, advance: Advance) -> None:
        """Read the complete output and compare its values with the source's. Raises SlimxError naming a tensor that
        differs."""
        ...


class _Stopped(Exception):
    """Another file failed."""


class Stream:
    """A file that is written from front to back; it takes the digest on the way."""

    def __init__(self, file: BinaryIO, advance: Advance, stop: threading.Event):
        self._file, self._advance, self._stop = file, advance, stop
        self._digest, self._size = xxhash.xxh3_128(), 0
        self.failure: BaseException | None = None
        """Error of a failed write. `torch.save` passes that on as an error of its own, which does not say."""

    def write(self, data: Any) -> int:
        """Write the bytes of `data`, anything with a buffer."""
        view = memoryview(data).cast("B")
        try:
            if self._stop.is_set():
                raise _Stopped
            at = 0
            while at < len(view):
                at += self._file.write(view[at:])
        except BaseException as error:
            self.failure = error
            raise
        self._digest.update(view)
        self._size += len(view)
        self._advance(len(view))
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: no byte is held back."""

    @property
    def record(self) -> FileRecord:
        """Size and digest of the bytes written so far."""
        return FileRecord(self._size, self._digest.hexdigest())


class Account:
    """Hears how far the work is; this one tells nobody."""

    def begin(self, what: str, total: int, done: int) -> None:
        """Begin a part of the work: `total` bytes, of which `done` were done before."""

    def add(self, nbytes: int) -> None:
        """Say that so many more bytes are done."""


def convert(
    conversion: Conversion, out: Path, *, threads: int, verify: bool, progress: Account | None = None
) -> dict[str, FileRecord]:
    """Write `conversion` into the new directory `out`; returns its tensor files.

    `verify`: read them again, and compare their bytes with what was written and their values with the source's. Raises
    SlimxError if it cannot; `out` is then not there, and finished files wait in OUT.partial for another try.
    """
    names = [file.name for file in conversion.files]
    partial, progress = Partial(out, names, conversion.small), progress or Account()
    try:
        with partial.owned(conversion.fingerprint):
            done: dict[str, Done] = {}
            try:
                done |= partial.finished(names, threads)
                _fill(conversion, partial, done, threads, progress)
                if verify:
                    _verify(conversion, partial, done, progress)
            except BaseException:
                if not done:
                    partial.discard()
                raise
            partial.publish()
    except OSError as error:
        raise partial.refusal(error) from error
    return {name: one.record for name, one in done.items()}


def _fill(conversion: Conversion, partial: Partial, done: dict[str, Done], threads: int, progress: Account) -> None:
    """Write what is not in `done`, add it there, and complete the output."""
    total = sum(file.nbytes for file in conversion.files)
    before = sum(file.nbytes for file in conversion.files if file.name in done)
    _check_space(partial.path, total - before)
    progress.begin("converting", total, before)
    with conversion.writing():
        _write_all(conversion.files, partial, done, threads, progress)
    conversion.finish(partial.path, {name: one.notes for name, one in done.items()})


def _check_space(partial: Path, wanted: int) -> None:
    system = os.statvfs(partial)
    free = system.f_bavail * system.f_frsize
    wanted += wanted // 100 + _SPARE_BYTES  # what stands around tensors grows with them
    if wanted > free:
        raise SlimxError(
            f"{partial}: its disk has {free / 1e9:.2f} GB free, {wanted / 1e9:.2f} GB are needed; "
            "make room or choose a directory on another disk",
            code="convert.space",
            about=str(partial),
        )


def _write_all(
    files: Sequence[PlannedFile], partial: Partial, done: dict[str, Done], threads: int, progress: Account
) -> None:
    """Write the files that are not in `done`, largest first, and add them to it."""
    stop, lock = threading.Event(), threading.Lock()

    def advance(nbytes: int) -> None:
        with lock:
            progress.add(nbytes)

    waiting = sorted((file for file in files if file.name not in done), key=lambda file: -file.nbytes)
    with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
        running = {pool.submit(_write_one, file, partial, advance, stop): file for file in waiting}
        try:
            for future in as_completed(running):
                done[running[future].name] = future.result()
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            _collect(running, done)
            if isinstance(error, _Stopped):  # by a file that failed, and may come to its end later
                error = next(cause for future in running if (cause := _failure(future)) is not None)
            raise error


def _collect(running: Mapping[Any, PlannedFile], done: dict[str, Done]) -> None:
    """Add what was finished while another file failed."""
    for future, file in running.items():
        if not future.cancelled() and future.exception() is None:
            done[file.name] = future.result()


def _failure(future: Future[Done]) -> BaseException | None:
    """The error that ended a file by itself, not because another one failed."""
    error = None if future.cancelled() else future.exception()
    return None if isinstance(error, _Stopped) else error


def _write_one(file: PlannedFile, partial: Partial, advance: Advance, stop: threading.Event) -> Done:
    if stop.is_set():
        raise _Stopped
    path = partial.path / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = partial.writing(path)
    try:
        with writing.open("wb", buffering=0) as handle:
            stream = Stream(handle, advance, stop)
            try:
                notes = file.write(stream)
            except Exception:
                if stream.failure is None:
                    raise
                raise stream.failure from None
            os.fsync(handle.fileno())
        writing.rename(path)
    except BaseException:
        stop.set()  # here: this thread would take the next file before anybody else hears of it
        writing.unlink(missing_ok=True)
        raise
    done = Done(stream.record, notes)
    partial.tell(file.name, done)
    return done


def _verify(conversion: Conversion, partial: Partial, done: Mapping[str, Done], progress: Account) -> None:
    progress.begin("verifying bytes", sum(one.record.size for one in done.values()), 0)
    for name, one in sorted(done.items()):
        if record(partial.path / name) != one.record:
            partial.told(name).unlink()
            raise SlimxError(
                f"{partial.path / name}: has other bytes than were written; run the same command again to write it "
                "anew, and look at the disk",
                code="convert.bytes",
                about=name,
            )
        progress.add(one.record.size)
    progress.begin("verifying values", sum(file.nbytes for file in conversion.files), 0)
    conversion.compare(partial.path, progress.add)
