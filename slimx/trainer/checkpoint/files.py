"""The files of a checkpoint: what each rank reports as written, and the manifest by which a reader checks them.

    iter_0000012/
        .metadata  metadata.json  common.pt  __0_0.distcp ...    torch_dist, as Megatron-LM names them
        slimx/manifest.json                                      size and xxHash of every file, written last
        slimx/reports/rank-00000.json                            while it is being written, removed at the commit
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from slimx.errors import SlimxError

MANIFEST = "slimx/manifest.json"
REPORTS = "slimx/reports"
_CHUNK = 8 * 2**20


class FileRecord(msgspec.Struct, frozen=True):
    """A file as it was written."""

    size: int
    """Bytes."""
    xxh3: str
    """XXH3 of 128 bits, in hexadecimal digits."""


class Item(msgspec.Struct, frozen=True):
    """Where one shard or object lies."""

    key: str
    offset: list[int] | None
    """Of the shard in its tensor; None: an object."""
    file: str
    position: int
    """First byte in the file."""
    length: int
    """Bytes."""


class Report(msgspec.Struct, frozen=True):
    """What one rank has brought to disk, or why it could not."""

    files: dict[str, FileRecord] = {}
    items: list[Item] = []
    failure: str | None = None


def record(path: Path) -> FileRecord:
    """Size and digest of a file."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())


def write(path: Path, data: bytes) -> FileRecord:
    """Write `data` and bring it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


def sync(directory: Path) -> None:
    """Bring the entries of a directory to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_report(directory: Path, rank: int, report: Report) -> None:
    """Tell the others, at once whole: it gets its name when it is on disk."""
    path = directory / REPORTS / _name(rank)
    partial = path.with_suffix(".partial")
    write(partial, msgspec.json.encode(report))
    partial.rename(path)


def read_reports(directory: Path, ranks: Iterable[int]) -> dict[int, Report]:
    """The reports of those `ranks` that have written one. Raises SlimxError with the reason of a rank that failed."""
    # One look at the directory: a network file system remembers for a while that a single file was not there.
    present = {entry.name for entry in os.scandir(directory / REPORTS)}
    out = {}
    for rank in ranks:
        if _name(rank) in present:
            report = msgspec.json.decode((directory / REPORTS / _name(rank)).read_bytes(), type=Report)
            if report.failure is not None:
                raise SlimxError(f"{directory}: trainer rank {rank} could not write its part ({report.failure})")
            out[rank] = report
    return out


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def write_manifest(directory: Path, files: dict[str, FileRecord]) -> None:
    """The mark of a complete checkpoint; `files` by path relative to `directory`."""
    write(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(files), indent=1))


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint. Raises SlimxError if the manifest is damaged."""
    path = directory / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, FileRecord])
    except (OSError, msgspec.DecodeError) as error:
        raise SlimxError(f"{path}: damaged ({error}); remove {directory} to continue from the one before") from error


def check_sizes(directory: Path, files: dict[str, FileRecord]) -> None:
    """Raises SlimxError naming the first file that is missing or has another size than when it was written."""
    for name, wanted in sorted(files.items()):
        try:
            size = (directory / name).stat().st_size
        except OSError:
            raise _damaged(directory, name, "is missing") from None
        if size != wanted.size:
            raise _damaged(directory, name, f"has {size} bytes, {wanted.size} were written")


def check_digests(directory: Path, files: dict[str, FileRecord]) -> None:
    """Read the files whole; raises SlimxError naming the first whose bytes are not those that were written."""
    for name, wanted in sorted(files.items()):
        try:
            found = record(directory / name)
        except OSError as error:
            raise _damaged(directory, name, f"cannot be read ({error.strerror})") from error
        if found != wanted:
            raise _damaged(directory, name, "has other bytes than were written")


def _damaged(directory: Path, name: str, problem: str) -> SlimxError:
    return SlimxError(f"{directory / name}: {problem}; remove {directory} to continue from the checkpoint before")
