"""Memory files that processes of one machine share: all trainer ranks write into one, all engines map it.

A memfd has no name in any directory: others open it through /proc, and the kernel frees it when the last process that
holds it ends, however it ends.
"""

from __future__ import annotations

import os
import re
import stat
import weakref

import torch

from slimx.errors import SlimxError

NAME = "slimx-bucket"
"""Name of every memory file, as /proc shows it."""
DESCRIPTOR = re.compile(r"/proc/(\d+|self)/fd/\d+")
BUCKET_FILE = re.compile(r"/.*/version-\d+(\.epoch-\d+\.partial)?/bucket-\d+\.(safetensors|delta)")
"""Path of a bucket's file of a version on disk (`slimx.extras.disk.shelf`), or of changes to it."""


class MemoryFile:
    """A shared piece of memory of this process. Others that still map it keep it alive for themselves after `close`."""

    def __init__(self, size: int):
        """`size` bytes, zero."""
        self._file = os.memfd_create(NAME, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        self.size = size
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.bytes = _map(self._file, size)
        """uint8 [size]."""

    def close(self) -> None:
        self._close()


def open_memory(path: str, size: int, *, private: bool = False) -> torch.Tensor:
    """The memory file of another process of this machine and user, or a bucket of a version on disk, uint8 [size]:
    writable, or `private`, where its pages are shared too but nothing that is written here could reach them.

    Raises SlimxError for anything else at `path`, which is not opened."""
    try:
        if not _offered(path):
            raise SlimxError(
                f"{path} is no bucket of a run of this user, neither memory of a trainer nor a file of a "
                "version on disk; it is not opened",
                code="bucket.foreign",
                about=path,
            )
        file = os.open(path, os.O_RDONLY if private else os.O_RDWR)
    except OSError as error:
        raise SlimxError(
            f"the bucket at {path} cannot be opened ({error.strerror}); its owner must run on the same machine, as the "
            "same user, and must not have released it",
            code="bucket.gone",
            about=path,
        ) from None
    try:
        if (held := os.fstat(file).st_size) < size:
            raise SlimxError(
                f"the bucket at {path} has {held} bytes, {size} were announced; publish again",
                code="bucket.size",
                about=path,
            )
        return _map(file, size, shared=not private)
    finally:
        os.close(file)


def _offered(path: str) -> bool:
    """Returns True if `path` is a memory file of this user by the name that slimx gives them, or a bucket's file."""
    if DESCRIPTOR.fullmatch(path):
        return os.readlink(path).startswith(f"/memfd:{NAME}") and os.stat(path).st_uid == os.geteuid()
    # The owner of a file on a network's file system may be anybody.
    return BUCKET_FILE.fullmatch(path) is not None and stat.S_ISREG(os.lstat(path).st_mode)


def _map(file: int, size: int, *, shared: bool = True) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Unlike mmap.mmap this holds no file of its own: a large model's buckets are thousands.
    return torch.from_file(f"/proc/self/fd/{file}", shared=shared, size=size, dtype=torch.uint8)
