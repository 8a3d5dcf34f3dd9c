"""Files that slimx adds to a checkpoint: a report by each rank about the files that it wrote, and a manifest of all
files, with which readers verify the files.

iter_0000012/
    .metadata  metadata.json  common.pt  __0_0.distcp ...    torch_dist files, named as by Megatron-LM
    slimx/manifest.json                                      size and xxHash of every file; written last
    slimx/reports/rank-00000.json or .failed                 only while the checkpoint is being written
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
"""Number of bytes reserved on disk for the report of a failed rank."""


class Damaged(SlimxError):
    """Error for a damaged file in a checkpoint. `checkpoint`: directory of the checkpoint. `about`: path of the file.
    `problem`: what is wrong with the file."""

    def __init__(self, checkpoint: Path, file: Path, problem: str):
        super().__init__(
            f"{file} {problem}; remove {checkpoint} to resume from the previous checkpoint",
            code="checkpoint.damaged",
            about=str(file),
        )
        self.checkpoint = checkpoint
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[Path, Path, str]]:
        """Pickles the arguments of `__init__`. By default, unpickling an error would pass only the message to
        `__init__`."""
        return type(self), (self.checkpoint, Path(self.about), self.problem)


class Item(msgspec.Struct, frozen=True):
    """Location of a shard of a tensor, or of a serialized object, in the files of a checkpoint."""

    key: str
    offset: list[int] | None
    """Index of the shard's first element in the tensor, by dimension; None for an object."""
    file: str
    position: int
    """Offset of the shard or object in `file`, in bytes."""
    length: int
    """Length of the shard or object in `file`, in bytes."""


class Report(msgspec.Struct, frozen=True):
    """Report that a rank has written all of its files for a checkpoint, with a list of the files, and of the shards and
    objects in them."""

    files: dict[str, FileRecord]
    """Size and digest of each file, by path relative to the checkpoint."""
    items: list[Item]


def write(path: Path, data: bytes) -> FileRecord:
    """Writes `data` to the file `path` and syncs the file to disk. Returns the file's size and digest."""
    write_synced(path, data)
    return record_bytes(data)


def write_report(directory: Path, rank: int, report: Report) -> None:
    """Writes the report of a rank about its files. The report's existence marks the rank as done."""
    replace_synced(_report(directory, rank), msgspec.json.encode(report))


def reserve_failure(directory: Path, rank: int) -> None:
    """Reserves the disk space that `write_failure` needs, because a full disk is the most common cause of failures."""
    write(_reserved(directory, rank), bytes(ROOM))


def write_failure(directory: Path, rank: int, reason: str) -> None:
    """Writes a report with the reason why this rank could not write its files, so that other ranks and the driver can
    read it. Uses the reserved disk space if there is any."""
    text = reason.encode()[:ROOM]
    reserved = _reserved(directory, rank)
    with reserved.open("r+b" if reserved.exists() else "wb") as file:
        file.write(text.ljust(ROOM))
        file.flush()
        os.fsync(file.fileno())
    reserved.rename(_report(directory, rank).with_suffix(".failed"))


def unreported(directory: Path, ranks: Iterable[int], holder: str = "trainer") -> list[int]:
    """Returns those of `ranks` that have not written their report yet. If a rank has failed, raises SlimxError with the
    reason that the rank wrote. `holder`: name of the rank group in messages."""
    # One directory listing, because a network file system may cache the absence of a single file for a while.
    present = {entry.name for entry in os.scandir(directory / REPORTS)}
    for name in sorted(present):
        if name.endswith(".failed"):
            reason = (directory / REPORTS / name).read_bytes().decode(errors="replace").strip()
            rank = int(name.removeprefix("rank-").removesuffix(".failed"))
            raise write_error(directory, f"{holder} rank {rank}", reason)
    return [rank for rank in ranks if _report(directory, rank).name not in present]


def write_error(directory: Path, holder: str, reason: str) -> SlimxError:
    """Returns the error that ends a run because a process could not write its files for a checkpoint. `holder`: name of
    the process, a rank or the driver."""
    return SlimxError(
        f"{holder} could not write its files of checkpoint {directory} ({reason}); free disk space or repair the disk, "
        "and run the same command again to resume from the newest complete checkpoint",
        code="checkpoint.write",
        about=str(directory),
    )


def read_report(directory: Path, rank: int) -> Report:
    """Reads the report of rank `rank` from checkpoint `directory`."""
    return msgspec.json.decode(_report(directory, rank).read_bytes(), type=Report)


def _report(directory: Path, rank: int) -> Path:
    return directory / REPORTS / f"rank-{rank:05d}.json"


def _reserved(directory: Path, rank: int) -> Path:
    return _report(directory, rank).with_suffix(".reserved")


def encode_records(files: dict[str, FileRecord]) -> bytes:
    """Encodes the sizes and digests of files, keyed by path, as JSON."""
    return msgspec.json.format(msgspec.json.encode(files), indent=1)


def decode_records(text: bytes) -> dict[str, FileRecord]:
    """Decodes the output of `encode_records`. Raises msgspec.DecodeError if the data is malformed."""
    return msgspec.json.decode(text, type=dict[str, FileRecord])


def write_manifest(directory: Path, files: dict[str, FileRecord]) -> None:
    """Writes the manifest, which marks the checkpoint in `directory` as complete. `files`: size and digest of each
    file, by path relative to `directory`."""
    write(directory / MANIFEST, encode_records(files))


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """Returns the size and digest of each file of a checkpoint, as recorded in the manifest. Raises Damaged if the
    manifest cannot be read."""
    path = directory / MANIFEST
    try:
        return decode_records(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise Damaged(directory, path, f"cannot be read ({error})") from error


def check_sizes(directory: Path, files: dict[str, FileRecord]) -> None:
    """Raises Damaged naming the first file that is missing or whose size differs from the size in `files`, the records
    of the manifest."""
    for name, expected in sorted(files.items()):
        try:
            size = (directory / name).stat().st_size
        except OSError:
            raise Damaged(directory, directory / name, "is missing") from None
        if size != expected.size:
            raise Damaged(directory, directory / name, f"has {size} bytes instead of {expected.size}")


def check_digests(directory: Path, files: dict[str, FileRecord]) -> None:
    """Reads all `files` of a checkpoint completely. Raises Damaged naming the first file whose content differs from the
    recorded digest."""
    for name, expected in sorted(files.items()):
        try:
            actual = record(directory / name)
        except OSError as error:
            raise Damaged(directory, directory / name, f"cannot be read ({error.strerror})") from error
        if actual != expected:
            raise Damaged(directory, directory / name, "has changed since it was written")
