"""Memory of a GPU that processes share, on an emulated device whose handles real processes open (cuda_stand).

The behaviour of a real GPU with handles, peers and streams is tested in `tests/gpu/test_sharing.py`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slimx.reshard.transports.device import DeviceMemory, fetch, opened
from tests.refusals import numbers, refused
from tests.unit.reshard.cuda_stand import DEVICE, memory_at, use_emulator
from tests.unit.reshard.transport_peer import Peer, Rank

SIZE = 5000


class DeviceRank(Rank):
    """Answers in another process; `emulate` first."""

    def emulate(self, library: str) -> str:
        self.library: ctypes.CDLL = use_emulator(Path(library), pytest.MonkeyPatch())
        self.memory = None
        return "ready"

    def allocate(self, size: int, value: int) -> str:
        """Allocates and fills memory of its own; returns its path."""
        self.memory = DeviceMemory(size)
        self.memory.bytes.fill_(value)
        return self.memory.path

    def write(self, path: str, size: int, value: int) -> int:
        """Fills another process's memory; returns how many it has open afterwards."""
        with opened(path, size) as address:
            memory_at(address, size, DEVICE).fill_(value)
        return self.library.emulator_open()

    def fetch(self, path: str, start: int, stop: int) -> list[int]:
        return fetch(path, start, stop, DEVICE).tolist()

    def hold(self, path: str) -> str:
        """Opens it and never closes it."""
        opened(path, 1).__enter__()
        return "held"


@pytest.fixture(autouse=True)
def emulator(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    return use_emulator(emulator_library, monkeypatch)


@pytest.fixture(scope="module")
def peers(emulator_library: Path) -> Iterator[Callable[[int], list[Peer]]]:
    """Living peers on the emulated device: those of an earlier test where they still live."""
    made: list[Peer] = []

    def take(count: int) -> list[Peer]:
        made[:] = [peer for peer in made if peer.process.is_alive()]
        new = [Peer(DeviceRank) for _ in range(count - len(made))]
        assert [peer.ask("emulate", str(emulator_library)) for peer in new] == ["ready"] * len(new)
        made.extend(new)
        return made[:count]

    yield take
    for peer in made:
        peer.process.kill()


def test_others_write_into_it_and_copy_out_of_it_and_keep_nothing_open(peers) -> None:
    memory, (peer,) = DeviceMemory(SIZE), peers(1)
    assert peer.ask("write", memory.path, SIZE, 7) == 0
    assert memory.bytes.eq(7).all() and len(memory.bytes) == SIZE
    memory.bytes[100:104] = torch.arange(4, dtype=torch.uint8)
    assert peer.ask("fetch", memory.path, 99, 105) == [7, 0, 1, 2, 3, 7]
    with opened(memory.path, SIZE) as address:
        assert address == memory.address, "its own process reaches it without a handle"
    path = memory.path
    memory.close()
    assert peer.ask("fetch", path, 0, 1) == ["bucket.gone", path]


def test_a_copy_is_independent_of_its_source(peers) -> None:
    memory = DeviceMemory(SIZE)
    memory.bytes.fill_(3)
    copy = fetch(memory.path, 10, 20, DEVICE)
    memory.bytes.fill_(4)
    assert copy.tolist() == [3] * 10


def test_a_killed_reader_leaves_memory_to_the_others(peers) -> None:
    memory, (first, second) = DeviceMemory(SIZE), peers(2)
    assert first.ask("hold", memory.path) == "held"
    first.process.kill()
    first.process.join(60)
    memory.bytes.fill_(9)
    assert second.ask("fetch", memory.path, 0, 3) == [9, 9, 9]


def test_memory_of_an_owner_that_died_is_refused_by_name(peers, emulator) -> None:
    (peer,) = peers(1)
    path = peer.ask("allocate", SIZE, 5)
    assert fetch(path, 0, 2, DEVICE).tolist() == [5, 5]
    emulator.emulator_fail(719)
    with refused("device.copy", about=path) as caught:
        fetch(path, 0, 2, DEVICE)
    assert numbers(caught.value) == [719, 2], "CUDA's error and the bytes"
    emulator.emulator_fail(0)
    assert emulator.emulator_open() == 0, "closed after a failure too"
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.join(60)
    with refused("bucket.gone", about=path) as caught:
        fetch(path, 0, 2, DEVICE)
    assert numbers(caught.value)[1] == peer.process.pid


def test_memory_of_another_machine_or_none_is_refused() -> None:
    path = DeviceMemory(SIZE).path
    machine = path.removeprefix("cuda-ipc:").partition("/")[0]
    elsewhere = path.replace(machine, "somewhere-else")
    with refused("bucket.machine", about=elsewhere) as caught:
        fetch(elsewhere, 0, 1, DEVICE)
    assert "publish.transport=nixl" in str(caught.value)
    with refused("device.room", about="publish.bucket_mib") as caught:
        DeviceMemory(1 << 62)
    assert (1 << 62) / 2**20 in numbers(caught.value)
