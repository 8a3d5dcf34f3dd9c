"""Writes the files of a conversion: in parallel, resumable after a kill, verified, all or nothing.

Files are planned before any is written, and their content depends only on the plan, so a resumed conversion writes the
same bytes as an uninterrupted one. `slimx.extras.convert.partial` manages the directory during the conversion.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Buffer, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from slimx.digest import FileRecord, record
from slimx.errors import SlimxError
from slimx.extras.convert.partial import Done, Partial
from slimx.extras.convert.sources import Advance
from slimx.json_types import Json

_SPARE_BYTES = 64 * 2**20
"""Free disk space in bytes that is required in addition to the space for the planned tensors, for headers, metadata and
tokenizer."""


class PlannedFile(Protocol):
    """Output file that has been planned but not yet written."""

    name: str
    """Path relative to the output directory."""
    nbytes: int
    """Total size of the file's tensors in bytes."""

    def write(self, stream: Stream) -> object:
        """Writes the output file to `stream`. Returns a description of the file, made of JSON values, which is passed
        to `Conversion.finish`."""
        ...


class Conversion(Protocol):
    """Planned conversion: the files to write, and the comparison of the output with its source."""

    files: Sequence[PlannedFile]
    fingerprint: str
    """Digest that identifies the conversion. Conversions with different files have different digests."""

    @property
    def small(self) -> Sequence[str]:
        """Names of the files that `finish` writes."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Returns a context manager that must be active while files are written. It may change settings of libraries,
        and restores them at the end."""
        ...

    def finish(self, directory: Path, notes: Json) -> None:
        """Writes the small files that complete the output in `directory`. `notes`: for each file, the result of its
        `write`."""
        ...

    def compare(self, directory: Path, advance: Advance) -> None:
        """Reads the complete output in `directory`, and compares its values with the source's. `advance`: receives the
        number of compared bytes. Raises SlimxError naming a tensor that differs."""
        ...


class _Stopped(Exception):
    """Raised in a thread that is writing a file, to stop it after another file failed."""


class Stream:
    """File that is written sequentially. The digest is computed during writing."""

    def __init__(self, file: BinaryIO, advance: Advance, stop: threading.Event):
        self._file = file
        self._advance = advance
        self._stop = stop
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self.failure: BaseException | None = None
        """Error of a failed write. It is kept here, because `torch.save` raises another error without the cause."""

    def write(self, data: Buffer) -> int:
        """Writes all bytes of `data`, and returns the number of bytes written."""
        view = memoryview(data).cast("B")
        try:
            if self._stop.is_set():
                raise _Stopped
            written = 0
            while written < len(view):
                written += self._file.write(view[written:])
        except BaseException as error:
            self.failure = error
            raise
        self._digest.update(view)
        self._size += len(view)
        self._advance(len(view))
        return len(view)

    def tell(self) -> int:
        """Returns the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Does nothing, because no bytes are buffered."""

    @property
    def record(self) -> FileRecord:
        """Size and digest of the bytes written so far."""
        return FileRecord(self._size, self._digest.hexdigest())


class ProgressListener(Protocol):
    """Listener to which a conversion reports its progress."""

    def begin(self, label: str, total: int, done: int) -> None:
        """Reports that the part of the conversion named `label` starts. `total`: number of bytes to process in this
        part; `done`: number of these bytes that an earlier attempt has processed."""

    def add(self, nbytes: int) -> None:
        """Reports that `nbytes` more bytes have been processed."""


class _Silent:
    """Progress listener that ignores all reports."""

    def begin(self, label: str, total: int, done: int) -> None:
        pass

    def add(self, nbytes: int) -> None:
        pass


def convert(
    conversion: Conversion, out: Path, *, threads: int, verify: bool, progress: ProgressListener | None = None
) -> dict[str, FileRecord]:
    """Writes `conversion` to the new directory `out`, and returns the sizes and digests of its tensor files by name.

    `threads`: number of files that are written in parallel. `progress`: listener to which progress is reported; None:
    no reports. `verify`: True to read the files again, and compare their bytes with those written and their values with
    the source's. Raises SlimxError on failure; `out` then does not exist, and finished files remain in OUT.partial for
    a retry.
    """
    names = [file.name for file in conversion.files]
    partial = Partial(out, names, conversion.small)
    listener = _Silent() if progress is None else progress
    try:
        with partial.owned(conversion.fingerprint):
            done: dict[str, Done] = {}
            try:
                done |= partial.finished(names, threads)
                _fill(conversion, partial, done, threads, listener)
                if verify:
                    _verify(conversion, partial, done, listener)
            except BaseException:
                if not done:
                    partial.discard()
                raise
            partial.publish()
    except OSError as error:
        raise partial.refusal(error) from error
    return {name: file.record for name, file in done.items()}


def _fill(
    conversion: Conversion, partial: Partial, done: dict[str, Done], threads: int, progress: ProgressListener
) -> None:
    """Writes the files that are not in `done`, adds their records to it, and completes the output."""
    total = 0
    before = 0
    for file in conversion.files:
        total += file.nbytes
        if file.name in done:
            before += file.nbytes
    _check_space(partial.path, total - before)
    progress.begin("converting", total, before)
    with conversion.writing():
        _write_all(conversion.files, partial, done, threads, progress)
    conversion.finish(partial.path, {name: file.notes for name, file in done.items()})


def _check_space(partial: Path, required: int) -> None:
    system = os.statvfs(partial)
    free = system.f_bavail * system.f_frsize
    required += required // 100 + _SPARE_BYTES  # file headers and metadata grow with the tensors
    if required > free:
        raise SlimxError(
            f"{partial}: the conversion needs {required / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on the "
            "disk; free up space, or choose an output directory on another disk",
            code="convert.space",
            about=str(partial),
        )


def _write_all(
    files: Sequence[PlannedFile], partial: Partial, done: dict[str, Done], threads: int, progress: ProgressListener
) -> None:
    """Writes the files that are not in `done`, the largest first, and adds their records to it."""
    stop = threading.Event()
    lock = threading.Lock()

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
            if isinstance(error, _Stopped):  # another file failed; its future may end later than this one
                for future in running:
                    failure = _failure(future)
                    if failure is not None:
                        raise failure from None
            raise error


def _collect(running: Mapping[Future[Done], PlannedFile], done: dict[str, Done]) -> None:
    """Adds to `done` the records of files that were completed while another file failed."""
    for future, file in running.items():
        if not future.cancelled() and future.exception() is None:
            done[file.name] = future.result()


def _failure(future: Future[Done]) -> BaseException | None:
    """Returns the error with which writing a file failed; None if the file was written, or if its writing was stopped
    because another file failed."""
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
        stop.set()  # before other threads notice the failure, so that this thread starts no other file
        writing.unlink(missing_ok=True)
        raise
    done = Done(stream.record, notes)
    partial.mark_done(file.name, done)
    return done


def _verify(conversion: Conversion, partial: Partial, done: Mapping[str, Done], progress: ProgressListener) -> None:
    progress.begin("verifying bytes", sum(file.record.size for file in done.values()), 0)
    for name, file in sorted(done.items()):
        if record(partial.path / name) != file.record:
            partial.record_path(name).unlink()
            raise SlimxError(
                f"the bytes in {partial.path / name} differ from the bytes that the conversion wrote; check the disk "
                "for errors, then run the same command again to rewrite the file",
                code="convert.bytes",
                about=name,
            )
        progress.add(file.record.size)
    progress.begin("verifying values", sum(file.nbytes for file in conversion.files), 0)
    conversion.compare(partial.path, progress.add)
