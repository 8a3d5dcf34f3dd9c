"""Shared host memory of one machine: trainer ranks write a bucket into a memory file, and engines map it.

A memory file (memfd) has no name in any directory. Other processes open it through /proc, and the kernel frees it when
the last process that has it open exits, for any reason."""

from __future__ import annotations

import os
import re
import stat
import weakref

import torch

from slimx.errors import SlimxError

NAME = "slimx-bucket"
"""Name of every memory file; its link in /proc is recognized by this name."""
DESCRIPTOR = re.compile(r"/proc/(\d+|self)/fd/\d+")
BUCKET_FILE = re.compile(r"/.*/version-\d+(\.epoch-\d+\.partial)?/bucket-\d+\.(safetensors|delta)")
"""Pattern for the paths of files that store, for a version on disk, a bucket or the changes to a bucket
(`slimx.extras.disk.versions`)."""


class MemoryFile:
    """Host memory of this process that other processes can map through `path`; mappings of other processes remain valid
    after `close`."""

    def __init__(self, size: int):
        """Allocates `size` bytes, all zero."""
        self._file = os.memfd_create(NAME, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        self.size = size
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.bytes = _map(self._file, size)
        """Memory as a tensor, uint8 [size]."""

    def close(self) -> None:
        self._close()


def open_memory(path: str, size: int, *, private: bool = False) -> torch.Tensor:
    """Maps the first `size` bytes of a bucket and returns them as a tensor, uint8 [size].

    `path`: the memory file of another process of the same user on this machine, or a bucket's file of a version on
    disk; any other path raises SlimxError without being opened. `private`: True makes writes to the tensor invisible to
    other processes; with False, writes change the shared memory or the file."""
    try:
        if not _offered(path):
            raise SlimxError(
                f"slimx refuses to open {path}, because this file is neither a bucket of this user's trainers nor a "
                "bucket of a version on disk; run trainers and engines as the same user",
                code="bucket.foreign",
                about=path,
            )
        file = os.open(path, os.O_RDONLY if private else os.O_RDWR)
    except OSError as error:
        raise SlimxError(
            f"the bucket at {path} cannot be opened ({error.strerror}); check that the trainer that wrote "
            "this bucket runs on this machine as the same user, and publish again",
            code="bucket.gone",
            about=path,
        ) from None
    try:
        available = os.fstat(file).st_size
        if available < size:
            raise SlimxError(
                f"the bucket at {path} has {available} bytes, but the publication announces {size} bytes; publish "
                "the weights again",
                code="bucket.size",
                about=path,
            )
        return _map(file, size, shared=not private)
    finally:
        os.close(file)


def _offered(path: str) -> bool:
    """Returns True if `path` is a memory file of this user with slimx's name, or a bucket's regular file."""
    if DESCRIPTOR.fullmatch(path):
        return os.readlink(path).startswith(f"/memfd:{NAME}") and os.stat(path).st_uid == os.geteuid()
    # A file on a network file system may have any owner.
    return BUCKET_FILE.fullmatch(path) is not None and stat.S_ISREG(os.lstat(path).st_mode)


def _map(file: int, size: int, *, shared: bool = True) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Unlike mmap.mmap, this keeps no file open; a large model has thousands of buckets.
    return torch.from_file(f"/proc/self/fd/{file}", shared=shared, size=size, dtype=torch.uint8)
