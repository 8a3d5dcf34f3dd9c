"""Versions in files reach other processes whole, or are refused by name. Real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimx.extras.disk.versions import VersionDirectory, newest
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from tests.refusals import refused
from tests.unit.reshard.transport_peer import Peer
from tests.unit.reshard.transport_stand import Packed, living

MANIFEST = Manifest(policy="actor", version=7, trainer_step=7, membership_epoch=3)


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    with living(1) as made:
        yield made


def written(shelf: VersionDirectory, manifest: Manifest, *packed: Packed) -> list[PackedBucket]:
    shelf.begin(manifest)
    return [shelf.add(number, one.bucket, one.file.bytes) for number, one in enumerate(packed)]


def test_a_version_on_disk_is_read_without_its_writer_and_by_safetensors(peers, tmp_path):
    first, second, (peer,) = Packed(2), Packed(2, kib=8), peers
    shelf = VersionDirectory(tmp_path)
    buckets = written(shelf, MANIFEST, first, second)
    assert peer.ask("map", buckets[0], 1) == 3, "an engine may read a bucket before the version is complete"
    assert newest(tmp_path) is None
    shelf.commit()
    stored = newest(tmp_path)
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


def test_changed_bytes_and_damaged_manifests_are_refused_by_name(peers, tmp_path):
    (peer,), shelf = peers, VersionDirectory(tmp_path)
    written(shelf, MANIFEST, Packed())
    shelf.commit()
    (bucket,) = newest(tmp_path).buckets
    with Path(bucket.path).open("r+b") as file:
        file.seek(bucket.tensors[-1].offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert peer.ask("map", bucket, 0) == ["peer.checksum", "odd"]
    path = tmp_path / "version-000007" / "manifest.json"
    path.write_text(path.read_text()[:-40])
    with refused("disk.manifest", about=str(path)):
        newest(tmp_path)


def test_unfinished_versions_are_ignored_and_old_ones_removed(tmp_path):
    shelf, packed = VersionDirectory(tmp_path), Packed()
    written(shelf, MANIFEST, packed)
    shelf.commit()
    later = Manifest(policy="actor", version=8, trainer_step=8, membership_epoch=3)
    written(shelf, later, packed)
    assert newest(tmp_path).manifest == MANIFEST, "a writer that dies here leaves version 7"
    other = VersionDirectory(tmp_path)
    written(other, later, packed, packed)
    other.commit()
    assert newest(tmp_path).manifest == later and len(newest(tmp_path).buckets) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["version-000008"]
    written(other, later, packed)
    other.commit()
    assert len(newest(tmp_path).buckets) == 1, "a version that is published again replaces itself"
