"""Digests that identify data when it is read again.

XXH3 of 128 bits for the files of checkpoints and conversions, which are large and guarded against damage only; BLAKE2b
of 128 bits for identities (prompts, vocabularies, requests), which must not collide."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import xxhash

_CHUNK = 8 * 2**20


class FileRecord(msgspec.Struct, frozen=True):
    """Size and digest of a file when it was written."""

    size: int
    """Bytes."""
    xxh3: str
    """XXH3 of 128 bits, in hexadecimal digits."""


def fingerprint(data: bytes) -> str:
    """Returns the identity of `data`: its BLAKE2b of 128 bits, in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def record_bytes(data: bytes) -> FileRecord:
    """Returns size and digest of a file with the content `data`."""
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


def record(path: Path) -> FileRecord:
    """Returns size and digest of a file."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())
