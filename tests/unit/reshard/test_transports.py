"""Buckets in memory reach other processes whole, or are refused by name. Real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slimx.reshard.transports.memory import MemoryFile, open_memory
from tests.unit.reshard.transport_peer import Peer
from tests.unit.reshard.transport_stand import Packed, living


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    with living(2) as made:
        yield made


def test_memory_is_mapped_by_other_processes_and_outlives_its_owners_close(peers):
    packed, (peer, _) = Packed(2), peers
    assert [peer.ask("map", packed.bucket, target) for target in (0, 1)] == [3, 3]
    packed.spoil()
    assert peer.ask("map", packed.bucket, 0) == 3
    assert peer.ask("map", packed.bucket, 1) == ["peer.checksum", "odd"]
    packed.file.close()
    assert peer.ask("map", packed.bucket, 0) == ["bucket.gone", packed.bucket.path]


def test_mapped_memory_holds_no_file_and_lives_as_long_as_its_tensor():
    file = MemoryFile(4096)
    descriptors = set(os.listdir("/proc/self/fd"))
    mapped = [open_memory(file.path, 4096) for _ in range(3)]
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    file.bytes[5] = 7
    path = file.path
    file.close()
    del file
    assert not os.path.exists(path) and all(int(memory[5]) == 7 for memory in mapped)
