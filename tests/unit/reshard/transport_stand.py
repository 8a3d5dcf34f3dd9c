"""Packed buckets in memory, and living processes that open them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.transports.memory import MemoryFile
from tests.unit.reshard.transport_peer import Peer


@contextmanager
def living(count: int) -> Iterator[list[Peer]]:
    """So many processes that open buckets."""
    made = [Peer() for _ in range(count)]
    assert [peer.ask("ready") for peer in made] == ["ready"] * count
    yield made
    for peer in made:
        peer.process.kill()


class Packed:
    """A bucket in memory: per target a matrix of random bytes of `kib`, a bfloat16 vector and an odd-sized one."""

    def __init__(self, targets: int = 1, kib: int = 4):
        generator = torch.Generator().manual_seed(1)
        self.tensors: list[dict[str, torch.Tensor]] = []
        places, end = [], 0
        for _ in range(targets):
            matrix = torch.randint(0, 256, (kib, 1024), generator=generator, dtype=torch.uint8)
            vector = torch.randn(96, generator=generator)
            self.tensors.append({"matrix": matrix, "vector": vector.bfloat16(), "odd": vector[:33].clone()})
            place = []
            for name, tensor in self.tensors[-1].items():
                kind = str(tensor.dtype).removeprefix("torch.")
                place.append(PackedTensor(name, kind, tuple(tensor.shape), end, tensor.nbytes, checksum_tensor(tensor)))
                end = -(-(end + tensor.nbytes) // 64) * 64
            places.append(tuple(place))
        self.file = MemoryFile(end)
        for place, tensors in zip(places, self.tensors, strict=True):
            for t in place:
                self.file.bytes[t.offset : t.offset + t.nbytes] = tensors[t.name].flatten().view(torch.uint8)
        self.bucket = PackedBucket(self.file.path, end, tuple(places))

    def spoil(self) -> None:
        """Change one byte of the last tensor."""
        self.file.bytes[self.bucket.tensors[-1].offset] ^= 1
