"""Tar archives that others have made, read in bounded memory."""

from __future__ import annotations

import tarfile
from typing import IO, Any

HEADERS = 2**20
"""Bytes that the headers of one member take, at most: names, attributes, parts of a sparse file."""


class Archive(tarfile.TarFile):
    """A tar archive whose headers are read in bounded memory.

    tarfile itself reads an extended header whole and keeps it with its member, goes back over a negative size for ever,
    and takes a damaged header for the end."""

    def next(self) -> tarfile.TarInfo | None:
        """The next member. Raises tarfile.ReadError for headers that are too long or damaged."""
        whole = self.fileobj
        self.fileobj: Any = (headers := _Headers(whole))
        try:
            member = super().next()
        except (ValueError, RecursionError) as error:
            raise tarfile.ReadError(f"a header is damaged ({error})") from error
        finally:
            self.fileobj = whole
        if sum(len(key) + len(value) for key, value in self.pax_headers.items()) > HEADERS:
            raise _too_long()
        if member is None and headers.last.strip(b"\0"):
            raise tarfile.ReadError("it goes on with something that is no header")  # which tarfile takes for its end
        if member is not None:
            if member.size < 0 or any(min(part) < 0 for part in member.sparse or ()):
                raise tarfile.ReadError(f"{member.name} has a negative size")
            member.pax_headers, member.uname, member.gname = {}, "", ""  # kept with each member, and never used
        return member


class _Headers:
    """A file of which up to `HEADERS` bytes are read."""

    def __init__(self, file: IO[bytes]):
        self._file, self._left = file, HEADERS
        self.seek, self.tell = file.seek, file.tell
        self.last = b""

    def read(self, size: int) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0:
            raise _too_long()
        self.last = self._file.read(size)
        return self.last


def _too_long() -> tarfile.ReadError:
    return tarfile.ReadError(f"the headers of a member take more than {HEADERS} bytes")
