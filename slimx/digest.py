"""Digests that identify data and detect damage.

XXH3 with 128 bits is used for the files of checkpoints and conversions, which are large and only need protection
against accidental damage. BLAKE2b with 128 bits is used for identities (prompts, vocabularies, requests), which must
not collide."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import xxhash

_CHUNK = 8 * 2**20


class FileRecord(msgspec.Struct, frozen=True):
    """Size and digest of a file at the time when it was written."""

    size: int
    """Size of the file in bytes."""
    xxh3: str
    """128-bit XXH3 digest of the file's content, in hexadecimal digits."""


def fingerprint(data: bytes) -> str:
    """Returns an identifier of `data`: its 128-bit BLAKE2b digest, in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def record_bytes(data: bytes) -> FileRecord:
    """Returns the size and digest of a file with the content `data`."""
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


def record(path: Path) -> FileRecord:
    """Reads the file at `path` and returns its size and digest."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())
