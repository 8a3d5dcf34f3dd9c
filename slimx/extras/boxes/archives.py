"""Reads untrusted tar archives in bounded memory."""

from __future__ import annotations

import tarfile
from typing import IO, Any

HEADERS = 2**20
"""Maximum size of the headers of one member (names, attributes, sparse map), in bytes."""


class Archive(tarfile.TarFile):
    """Tar archive whose headers are read in bounded memory.

    tarfile itself reads an extended header of any size and keeps it with its member, loops forever on a negative size,
    and treats a damaged header as the end of the archive.
    """

    def next(self) -> tarfile.TarInfo | None:
        """Returns the next member, or None at the end. Raises tarfile.ReadError for headers that are too long or
        damaged."""
        file = self.fileobj
        headers = _Headers(file)
        self.fileobj: Any = headers
        try:
            member = super().next()
        except (ValueError, RecursionError) as error:
            raise tarfile.ReadError(f"a header is damaged ({error})") from error
        finally:
            self.fileobj = file
        if sum(len(key) + len(value) for key, value in self.pax_headers.items()) > HEADERS:
            raise _too_long()
        if member is None:
            if headers.last.strip(b"\0"):
                raise tarfile.ReadError("a header is invalid")  # tarfile treats it as the end of the archive
            return None
        if member.size < 0 or _has_negative_part(member):
            raise tarfile.ReadError(f"{member.name} has a negative size")
        # Unused fields, which tarfile would keep in memory with every member.
        member.pax_headers = {}
        member.uname = ""
        member.gname = ""
        return member


class _Headers:
    """Wrapper around a file that permits reading at most `HEADERS` bytes."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._left = HEADERS
        self.seek = file.seek
        self.tell = file.tell
        self.last = b""

    def read(self, size: int) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0:
            raise _too_long()
        self.last = self._file.read(size)
        return self.last


def sparse_parts(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Returns the offset and the size of each data region of a sparse file; [] for other members."""
    parts: Any = member.sparse  # typeshed declares this as bytes
    return list(parts or ())


def _has_negative_part(member: tarfile.TarInfo) -> bool:
    return any(min(part) < 0 for part in sparse_parts(member))


def _too_long() -> tarfile.ReadError:
    return tarfile.ReadError(f"the headers of a file exceed {HEADERS} bytes")
