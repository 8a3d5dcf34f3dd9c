"""Writes the files of a conversion: in parallel, resumable after a kill, all or nothing.

    OUT.partial/                 while it is written; becomes OUT at the end
        FILE.writing             a file that is being written; begun anew after a kill
        FILE                     a finished file, on disk
        .conversion/plan         what is converted into what: another conversion must not go on here
        .conversion/done/FILE    size and XXH3 of a finished file, and what its writer noted

A file is planned before anything is written, and its bytes depend on the plan alone. So a conversion that was killed
gives the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import xxhash

from slimx.digest import FileRecord, record
from slimx.durable import sync_directory, write_synced
from slimx.errors import SlimxError

_STATE = ".conversion"
_WRITING = ".writing"
_SPARE_BYTES = 64 * 2**20
"""Beyond the planned tensors: headers, metadata, tokenizer."""


class PlannedFile(Protocol):
    """A file of the output."""

    name: str
    """Path relative to the output."""
    nbytes: int
    """Of its tensors."""

    def write(self, stream: Stream) -> Any:
        """Write it; what is returned goes, as JSON, to the conversion's `finish`."""
        ...


class Conversion(Protocol):
    """What becomes of what."""

    files: Sequence[PlannedFile]
    fingerprint: str
    """Differs between conversions whose files differ."""

    def writing(self) -> AbstractContextManager[None]:
        """Holds while files are written."""
        ...

    def finish(self, directory: Path, notes: Mapping[str, Any]) -> None:
        """Add the small files that complete the output; `notes` by file name."""
        ...


class _Done(msgspec.Struct, frozen=True):
    record: FileRecord
    notes: Any


class _Stopped(Exception):
    """Another file failed."""


class Stream:
    """A file that is written from front to back; it takes the digest on the way."""

    def __init__(self, file: BinaryIO, advance: Callable[[int], None], stop: threading.Event):
        self._file, self._advance, self._stop = file, advance, stop
        self._digest, self._size = xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        """Write the bytes of `data`, anything with a buffer."""
        if self._stop.is_set():
            raise _Stopped
        view = memoryview(data).cast("B")
        self._digest.update(view)
        at = 0
        while at < len(view):
            at += self._file.write(view[at:])
        self._size += len(view)
        self._advance(len(view))
        return len(view)

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def record(self) -> FileRecord:
        """Of what has been written."""
        return FileRecord(self._size, self._digest.hexdigest())


class Progress(Protocol):
    """Hears how far the work is."""

    def start(self, what: str, total: int, done: int) -> None:
        """`total` bytes are to be done, of which `done` were before."""
        ...

    def advance(self, nbytes: int) -> None: ...


def convert(
    conversion: Conversion, out: Path, *, threads: int, verify: bool, progress: Progress | None = None
) -> dict[str, FileRecord]:
    """Write `conversion` into the new directory `out`; returns its tensor files. `verify`: read them again and compare.

    Raises SlimxError if it cannot; `out` is then not there, and finished files wait in OUT.partial for another try.
    """
    if out.exists():
        raise SlimxError(f"{out} is there already; remove it or choose another directory")
    partial = out.with_name(out.name + ".partial")
    state = partial / _STATE
    with _owned(partial, conversion.fingerprint):
        done = _finished(partial, conversion.files)
        total = sum(file.nbytes for file in conversion.files)
        before = sum(file.nbytes for file in conversion.files if file.name in done)
        try:
            _check_space(partial, total - before)
            if progress is not None:
                progress.start("converting", total, before)
            with conversion.writing():
                _write_all(conversion.files, partial, done, threads, progress)
            try:
                conversion.finish(partial, {name: one.notes for name, one in done.items()})
            except OSError as error:
                raise _cannot_write(partial, error) from error
            if verify:
                _verify(partial, done, progress)
        except BaseException:
            if not done:
                shutil.rmtree(partial)
            raise
        shutil.rmtree(state)
        for directory in {(partial / file.name).parent for file in conversion.files} | {partial}:
            sync_directory(directory)
        partial.rename(out)
        sync_directory(out.parent)
    return {name: one.record for name, one in done.items()}


@contextlib.contextmanager
def _owned(partial: Path, fingerprint: str) -> Iterator[None]:
    """Make `partial` and hold it: one process at a time, and for one conversion only."""
    state = partial / _STATE
    try:
        (state / "done").mkdir(parents=True, exist_ok=True)
        handle = os.open(state, os.O_RDONLY)
    except OSError as error:
        raise _cannot_write(partial, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SlimxError(f"{partial}: another process is writing it; wait for it to end") from None
        plan = state / "plan"
        if not plan.exists():
            write_synced(plan, fingerprint.encode())
        elif plan.read_text() != fingerprint:
            raise SlimxError(
                f"{partial} was begun by a conversion of other files or with other options; remove it to begin anew"
            )
        yield
    finally:
        os.close(handle)


def _finished(partial: Path, files: Sequence[PlannedFile]) -> dict[str, _Done]:
    """What an earlier try has left complete, by name."""
    for file in partial.rglob("*" + _WRITING):
        file.unlink()
    found = {}
    for file in files:
        told, path = _told(partial, file.name), partial / file.name
        if told.is_file() and path.is_file():
            with contextlib.suppress(msgspec.DecodeError):
                done = msgspec.json.decode(told.read_bytes(), type=_Done)
                if done.record.size == path.stat().st_size:
                    found[file.name] = done
    return found


def _told(partial: Path, name: str) -> Path:
    return partial / _STATE / "done" / name.replace("/", "-")


def _check_space(partial: Path, wanted: int) -> None:
    system = os.statvfs(partial)
    free = system.f_bavail * system.f_frsize
    wanted += wanted // 100 + _SPARE_BYTES  # what stands around tensors grows with them
    if wanted > free:
        raise SlimxError(
            f"{partial}: its disk has {free / 1e9:.2f} GB free, {wanted / 1e9:.2f} GB are needed; "
            "make room or choose a directory on another disk"
        )


def _write_all(
    files: Sequence[PlannedFile], partial: Path, done: dict[str, _Done], threads: int, progress: Progress | None
) -> None:
    """Write the files that are not in `done`, largest first, and add them to it."""
    stop, lock = threading.Event(), threading.Lock()

    def advance(nbytes: int) -> None:
        if progress is not None:
            with lock:
                progress.advance(nbytes)

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
            if isinstance(error, OSError):
                raise _cannot_write(partial, error) from error
            raise error


def _collect(running: Mapping[Any, PlannedFile], done: dict[str, _Done]) -> None:
    """Add what was finished while another file failed."""
    for future, file in running.items():
        if not future.cancelled() and future.exception() is None:
            done[file.name] = future.result()


def _failure(future: Future[_Done]) -> BaseException | None:
    """What ended a file by itself."""
    error = None if future.cancelled() else future.exception()
    return None if isinstance(error, _Stopped) else error


def _write_one(file: PlannedFile, partial: Path, advance: Callable[[int], None], stop: threading.Event) -> _Done:
    if stop.is_set():
        raise _Stopped
    path = partial / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(path.name + _WRITING)
    try:
        with writing.open("wb", buffering=0) as handle:
            stream = Stream(handle, advance, stop)
            notes = file.write(stream)
            os.fsync(handle.fileno())
        writing.rename(path)
    except BaseException:
        stop.set()  # here: this thread would take the next file before anybody else hears of it
        writing.unlink(missing_ok=True)
        raise
    done = _Done(stream.record, notes)
    # Not brought to disk: where a crash of the machine leaves it damaged, or the file's name is lost, that file is
    # written again.
    told = _told(partial, file.name)
    writing = told.with_name(told.name + _WRITING)
    writing.write_bytes(msgspec.json.encode(done))
    writing.rename(told)
    return done


def _verify(partial: Path, done: Mapping[str, _Done], progress: Progress | None) -> None:
    if progress is not None:
        progress.start("verifying", sum(one.record.size for one in done.values()), 0)
    for name, one in sorted(done.items()):
        if record(partial / name) != one.record:
            _told(partial, name).unlink()
            raise SlimxError(
                f"{partial / name}: has other bytes than were written; run the same command again to write it anew, "
                "and look at the disk"
            )
        if progress is not None:
            progress.advance(one.record.size)


def _cannot_write(partial: Path, error: OSError) -> SlimxError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SlimxError(
            f"{partial}: no space is left on its disk; make room and run the same command again: it goes on after the "
            "files that are finished"
        )
    return SlimxError(f"{error.filename or partial}: cannot be written or read ({error.strerror})")
