"""The files of a checkpoint: each rank's report of the files it wrote, and the manifest that readers verify against.

iter_0000012/
    .metadata  metadata.json  common.pt  __0_0.distcp ...    torch_dist, as Megatron-LM names them
    slimx/manifest.json                                      size and xxHash of every file, written last
    slimx/reports/rank-00000.json or .failed                 while it is being written, removed at the commit
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from slimx.digest import FileRecord as FileRecord
from slimx.digest import record as record
from slimx.digest import record_bytes
from slimx.durable import replace_synced, write_synced
from slimx.errors import SlimxError

MANIFEST = "slimx/manifest.json"
REPORTS = "slimx/reports"
ROOM = 1024
"""Bytes reserved for the report of a failure."""


class Damaged(SlimxError):
    """Error for a damaged checkpoint file. `checkpoint`: its directory, `about`: the file."""

    def __init__(self, checkpoint: Path, file: Path, problem: str):
        super().__init__(
            f"{file}: {problem}; remove {checkpoint} to continue from the checkpoint before",
            code="checkpoint.damaged",
            about=str(file),
        )
        self.checkpoint = checkpoint
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[Path, Path, str]]:
        """Pickles the arguments of `__init__`, as DeadlineError does: by default only the message would be passed."""
        return type(self), (self.checkpoint, Path(self.about), self.problem)


class Item(msgspec.Struct, frozen=True):
    """Location on disk of one shard or object."""

    key: str
    offset: list[int] | None
    """First element of the shard in its tensor; None for an object."""
    file: str
    position: int
    """First byte in the file."""
    length: int
    """Bytes of the shard or object in the file."""


class Report(msgspec.Struct, frozen=True):
    """The files that one rank has written to disk, and the shards in them."""

    files: dict[str, FileRecord]
    """Size and digest of each file, by path relative to the checkpoint."""
    items: list[Item]


def write(path: Path, data: bytes) -> FileRecord:
    """Writes `data` and syncs it to disk."""
    write_synced(path, data)
    return record_bytes(data)


def write_report(directory: Path, rank: int, report: Report) -> None:
    """Writes the report that marks this rank as done."""
    replace_synced(_report(directory, rank), msgspec.json.encode(report))


def reserve_failure(directory: Path, rank: int) -> None:
    """Reserves the disk space that `write_failure` needs, since a full disk is the most common failure."""
    write(_reserved(directory, rank), bytes(ROOM))


def write_failure(directory: Path, rank: int, reason: str) -> None:
    """Reports to the other ranks that this rank could not write its part, and why; uses the reserved space if any."""
    text = reason.encode()[:ROOM]
    reserved = _reserved(directory, rank)
    with reserved.open("r+b" if reserved.exists() else "wb") as file:
        file.write(text.ljust(ROOM))
        file.flush()
        os.fsync(file.fileno())
    reserved.rename(_report(directory, rank).with_suffix(".failed"))


def unreported(directory: Path, ranks: Iterable[int], holder: str = "trainer") -> list[int]:
    """Lists those of `ranks` that are still writing; messages call them `holder` ranks.

    Raises SlimxError with the reason of a rank that failed."""
    # One directory listing: a network file system may cache for a while that a single file did not exist.
    present = {entry.name for entry in os.scandir(directory / REPORTS)}
    for name in sorted(present):
        if name.endswith(".failed"):
            reason = (directory / REPORTS / name).read_bytes().decode(errors="replace").strip()
            rank = int(name.removeprefix("rank-").removesuffix(".failed"))
            raise write_error(directory, f"{holder} rank {rank}", reason)
    return [rank for rank in ranks if _report(directory, rank).name not in present]


def write_error(directory: Path, holder: str, reason: str) -> SlimxError:
    """Builds the error that ends a run when `holder` could not write its part of a checkpoint."""
    return SlimxError(
        f"{directory}: {holder} could not write its part of the checkpoint ({reason}); free space or fix the disk, "
        "then start again: the run resumes from the newest complete checkpoint",
        code="checkpoint.write",
        about=str(directory),
    )


def read_report(directory: Path, rank: int) -> Report:
    """Reads the report of `rank`."""
    return msgspec.json.decode(_report(directory, rank).read_bytes(), type=Report)


def _report(directory: Path, rank: int) -> Path:
    return directory / REPORTS / f"rank-{rank:05d}.json"


def _reserved(directory: Path, rank: int) -> Path:
    return _report(directory, rank).with_suffix(".reserved")


def encode_records(files: dict[str, FileRecord]) -> bytes:
    """Encodes records by name as JSON text."""
    return msgspec.json.format(msgspec.json.encode(files), indent=1)


def decode_records(text: bytes) -> dict[str, FileRecord]:
    """Decodes the output of `encode_records`. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=dict[str, FileRecord])


def write_manifest(directory: Path, files: dict[str, FileRecord]) -> None:
    """Writes the manifest, which marks a checkpoint as complete; `files` by path relative to `directory`."""
    write(directory / MANIFEST, encode_records(files))


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """Returns the files of a checkpoint. Raises Damaged if the manifest cannot be read."""
    path = directory / MANIFEST
    try:
        return decode_records(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise Damaged(directory, path, f"cannot be read ({error})") from error


def check_sizes(directory: Path, files: dict[str, FileRecord]) -> None:
    """Raises Damaged naming the first file that is missing or whose size has changed since it was written."""
    for name, expected in sorted(files.items()):
        try:
            size = (directory / name).stat().st_size
        except OSError:
            raise Damaged(directory, directory / name, "is missing") from None
        if size != expected.size:
            raise Damaged(directory, directory / name, f"has {size} bytes, {expected.size} were written")


def check_digests(directory: Path, files: dict[str, FileRecord]) -> None:
    """Reads all files completely. Raises Damaged naming the first whose content differs from what was written."""
    for name, expected in sorted(files.items()):
        try:
            actual = record(directory / name)
        except OSError as error:
            raise Damaged(directory, directory / name, f"cannot be read ({error.strerror})") from error
        if actual != expected:
            raise Damaged(directory, directory / name, "has other bytes than were written")
