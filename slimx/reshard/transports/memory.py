"""Memory files that processes of one machine share: all trainer ranks write into one, all engines map it.

A memfd has no name in any directory. Other processes open it through /proc, and the kernel frees it when the last
process that holds it exits for any reason."""

from __future__ import annotations

import os
import re
import stat
import weakref

import torch

from slimx.errors import SlimxError

NAME = "slimx-bucket"
"""Name of every memory file in /proc."""
DESCRIPTOR = re.compile(r"/proc/(\d+|self)/fd/\d+")
BUCKET_FILE = re.compile(r"/.*/version-\d+(\.epoch-\d+\.partial)?/bucket-\d+\.(safetensors|delta)")
"""Path of a bucket's file, or of changes to it, of a version on disk (`slimx.extras.disk.versions`)."""


class MemoryFile:
    """Shared memory of this process. Processes that have mapped it keep it after `close`."""

    def __init__(self, size: int):
        """Allocates `size` zeroed bytes."""
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
    """Opens another process's memory file, of this machine and user, or a bucket of a version on disk, as uint8 [size]:
    writable, or `private`, which shares pages but discards writes.

    Raises SlimxError for any other `path`, without opening it."""
    try:
        if not _offered(path):
            raise SlimxError(
                f"{path} is not a bucket of a run of this user, neither trainer memory nor a file of a version on "
                "disk; it is not opened",
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
        available = os.fstat(file).st_size
        if available < size:
            raise SlimxError(
                f"the bucket at {path} has {available} bytes, but {size} were announced; publish again",
                code="bucket.size",
                about=path,
            )
        return _map(file, size, shared=not private)
    finally:
        os.close(file)


def _offered(path: str) -> bool:
    """Returns True if `path` is a memory file of this user with slimx's name, or a bucket's file."""
    if DESCRIPTOR.fullmatch(path):
        return os.readlink(path).startswith(f"/memfd:{NAME}") and os.stat(path).st_uid == os.geteuid()
    # A file on a network file system may have any owner.
    return BUCKET_FILE.fullmatch(path) is not None and stat.S_ISREG(os.lstat(path).st_mode)


def _map(file: int, size: int, *, shared: bool = True) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Unlike mmap.mmap this keeps no file open: a large model has thousands of buckets.
    return torch.from_file(f"/proc/self/fd/{file}", shared=shared, size=size, dtype=torch.uint8)
