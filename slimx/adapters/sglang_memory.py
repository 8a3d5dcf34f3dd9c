"""The publisher's memory file as the server sees it: mapped privately, each tensor a view."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from slimx.errors import SlimxError


def map_bucket(fd_path: str, size: int, bucket: int) -> mmap.mmap:
    """The first `size` bytes of the file at `fd_path`. Its pages are shared, and nothing here could write to them."""
    try:
        fd = os.open(fd_path, os.O_RDONLY)
    except OSError as error:
        raise SlimxError(
            f"bucket {bucket} at {fd_path} cannot be opened ({error.strerror}); "
            "publisher and engine must share a machine and a user"
        ) from None
    try:
        if (held := os.fstat(fd).st_size) < size:
            raise SlimxError(f"bucket {bucket} at {fd_path} has {held} bytes, {size} were announced; publish again")
        # torch.frombuffer warns about read-only buffers; a private writable mapping is as safe and silent.
        return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def tensor_at(memory: mmap.mmap, entry: dict[str, Any]) -> torch.Tensor:
    """The tensor that `entry` ({dtype, shape, offset, nbytes}) describes, a view that keeps the mapping alive."""
    dtype = getattr(torch, entry["dtype"])
    count = entry["nbytes"] // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry["offset"]).view(entry["shape"])
