"""Memory files that processes of one machine share: all trainer ranks write into one, all engines map it.

A memfd has no name in any directory: others open it through /proc, and the kernel frees it when the last process that
holds it ends, however it ends.
"""

from __future__ import annotations

import os
import weakref

import torch

from slimx.errors import SlimxError


class MemoryFile:
    """A shared piece of memory of this process. Others that still map it keep it alive for themselves after `close`."""

    def __init__(self, size: int):
        """`size` bytes, zero."""
        self._file = os.memfd_create("slimx-bucket", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        self.size = size
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.bytes = _map(self._file, size)
        """uint8 [size]."""

    def close(self) -> None:
        self._close()


def open_memory(path: str, size: int, *, private: bool = False) -> torch.Tensor:
    """The memory file of another process of this machine and user, uint8 [size]: writable, or `private`, where its
    pages are shared too but nothing that is written here could reach them."""
    try:
        file = os.open(path, os.O_RDONLY if private else os.O_RDWR)
    except OSError as error:
        raise SlimxError(
            f"the bucket at {path} cannot be opened ({error.strerror}); its owner must run on the same machine, as the "
            "same user, and must not have released it"
        ) from None
    try:
        if (held := os.fstat(file).st_size) < size:
            raise SlimxError(f"the bucket at {path} has {held} bytes, {size} were announced; publish again")
        return _map(file, size, shared=not private)
    finally:
        os.close(file)


def _map(file: int, size: int, *, shared: bool = True) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Unlike mmap.mmap this holds no file of its own: a large model's buckets are thousands.
    return torch.from_file(f"/proc/self/fd/{file}", shared=shared, size=size, dtype=torch.uint8)
