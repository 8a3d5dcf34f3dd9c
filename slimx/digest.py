"""Size and digest of files, by which what was written is recognised when it is read again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

_CHUNK = 8 * 2**20


class FileRecord(msgspec.Struct, frozen=True):
    """A file as it was written."""

    size: int
    """Bytes."""
    xxh3: str
    """XXH3 of 128 bits, in hexadecimal digits."""


def record(path: Path) -> FileRecord:
    """Size and digest of a file."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())
