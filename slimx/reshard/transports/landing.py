"""Both ends of a channel: the bytes of a packed bucket, and the memory that one lands in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.device import DeviceMemory, opened, tensor_at
from slimx.reshard.transports.memory import MemoryFile, open_memory

GPU = torch.device("cuda", 0)
"""GPU of a process at an end of a channel: the first that it may use."""


@contextmanager
def bytes_of(packed: PackedBucket) -> Iterator[torch.Tensor]:
    """The bytes of a bucket of another process of this machine, uint8 [size], for the time of the block."""
    if packed.on_device:
        with opened(packed.path, packed.size, GPU) as address:
            yield tensor_at(address, packed.size, GPU)
    else:
        yield open_memory(packed.path, packed.size)


class Landing:
    """The landing place of buckets that come one after another: memory that others on this machine open by its path."""

    def __init__(self) -> None:
        self._device: DeviceMemory | None = None

    @contextmanager
    def of(self, packed: PackedBucket) -> Iterator[tuple[PackedBucket, torch.Tensor]]:
        """Memory of the same kind as the sender's: the bucket as it will be there, and the place, uint8 [size].

        Whoever has opened host memory keeps it beyond the block; from a GPU it must have been copied by then, as the
        next bucket takes its place.
        """
        if packed.on_device:
            if self._device is None or self._device.size < packed.size:
                self.close()
                self._device = DeviceMemory(packed.size, GPU)
            yield replace(packed, path=self._device.path), self._device.bytes[: packed.size]
            return
        file = MemoryFile(packed.size)
        try:
            yield replace(packed, path=file.path), file.bytes
        finally:
            file.close()

    def close(self) -> None:
        """Give the device its memory back."""
        if self._device is not None:
            self._device.close()
            self._device = None
