"""Buckets in memory and in files reach other processes whole, or are refused by name. Real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.transports import disk
from slimx.reshard.transports.memory import MemoryFile, open_memory
from tests.refusals import refused
from tests.unit.reshard.transport_peer import Peer

MANIFEST = Manifest(policy="actor", version=7, trainer_step=7, membership_epoch=3)


@pytest.fixture(scope="module")
def peers() -> Iterator[Callable[[int], list[Peer]]]:
    """Living peers: those of an earlier test where they still live."""
    made: list[Peer] = []

    def take(count: int) -> list[Peer]:
        made[:] = [peer for peer in made if peer.process.is_alive()]
        new = [Peer() for _ in range(count - len(made))]
        assert [peer.ask("ready") for peer in new] == ["ready"] * len(new)
        made.extend(new)
        return made[:count]

    yield take
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


# Memory ---------------------------------------------------------------------------------------------------------------


def test_memory_is_mapped_by_other_processes_and_outlives_its_owners_close(peers):
    packed, (peer, _) = Packed(2), peers(2)
    assert [peer.ask("map", packed.bucket, target) for target in (0, 1)] == [3, 3]
    packed.spoil()
    assert peer.ask("map", packed.bucket, 0) == 3
    assert peer.ask("map", packed.bucket, 1) == ["peer.checksum", "odd"]
    packed.file.close()
    assert peer.ask("map", packed.bucket, 0) == ["bucket.gone", packed.bucket.path]


def test_mapped_memory_holds_no_file_and_lives_as_long_as_its_tensor():
    file = MemoryFile(4096)
    held = set(os.listdir("/proc/self/fd"))
    mapped = [open_memory(file.path, 4096) for _ in range(3)]
    assert set(os.listdir("/proc/self/fd")) <= held
    file.bytes[5] = 7
    path = file.path
    file.close()
    del file
    assert not os.path.exists(path) and all(int(memory[5]) == 7 for memory in mapped)


# Disk -----------------------------------------------------------------------------------------------------------------


def written(shelf: disk.Shelf, manifest: Manifest, *packed: Packed) -> list[PackedBucket]:
    shelf.begin(manifest)
    return [shelf.add(number, one.bucket, one.file.bytes) for number, one in enumerate(packed)]


def test_a_version_on_disk_is_read_without_its_writer_and_is_what_safetensors_reads_too(peers, tmp_path):
    first, second, (peer,) = Packed(2), Packed(2, kib=8), peers(1)
    shelf = disk.Shelf(tmp_path)
    buckets = written(shelf, MANIFEST, first, second)
    assert peer.ask("map", buckets[0], 1) == 3, "an engine may read a bucket before the version is complete"
    assert disk.newest(tmp_path) is None
    shelf.commit()
    stored = disk.newest(tmp_path)
    assert stored is not None and stored.manifest == MANIFEST
    assert asyncio.run(stored.forms()) == [{"matrix": "uint8:8,1024", "vector": "bfloat16:96", "odd": "float32:33"}] * 2
    for number in range(asyncio.run(stored.bucket_count())):
        bucket = asyncio.run(stored.gather(number))
        assert [peer.ask("map", bucket, target) for target in (0, 1)] == [3, 3]
        assert all(tensor.offset % 64 == 0 for tensor in bucket.tensors)
        read = load_file(bucket.path)
        for rank, tensors in enumerate((first, second)[number].tensors):
            assert all(torch.equal(read[f"rank {rank}: {name}"], tensor) for name, tensor in tensors.items())
    with refused("disk.version", about=str(stored.path)):
        asyncio.run(stored.begin(Manifest(policy="actor", version=8, trainer_step=8, membership_epoch=3)))


def test_a_changed_byte_on_disk_is_found_and_a_damaged_manifest_is_refused_by_name(peers, tmp_path):
    (peer,), shelf = peers(1), disk.Shelf(tmp_path)
    written(shelf, MANIFEST, Packed())
    shelf.commit()
    (bucket,) = disk.newest(tmp_path).buckets
    with Path(bucket.path).open("r+b") as file:
        file.seek(bucket.tensors[-1].offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert peer.ask("map", bucket, 0) == ["peer.checksum", "odd"]
    path = tmp_path / "version-000007" / disk.MANIFEST
    path.write_text(path.read_text()[:-40])
    with refused("disk.manifest", about=str(path)):
        disk.newest(tmp_path)


def test_an_unfinished_version_does_not_count_and_the_newest_complete_one_stays_alone(tmp_path):
    shelf, packed = disk.Shelf(tmp_path), Packed()
    written(shelf, MANIFEST, packed)
    shelf.commit()
    later = Manifest(policy="actor", version=8, trainer_step=8, membership_epoch=3)
    written(shelf, later, packed)
    assert disk.newest(tmp_path).manifest == MANIFEST, "a writer that dies here leaves version 7"
    other = disk.Shelf(tmp_path)
    written(other, later, packed, packed)
    other.commit()
    assert disk.newest(tmp_path).manifest == later and len(disk.newest(tmp_path).buckets) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["version-000008"]
    written(other, later, packed)
    other.commit()
    assert len(disk.newest(tmp_path).buckets) == 1, "a version that is published again replaces itself"
