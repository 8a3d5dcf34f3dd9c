"""Memory of a GPU that processes share, on an emulated device whose handles real processes open (cuda_stand).

What a GPU does with handles, peers and streams is tested on one: `tests/gpu/test_sharing.py`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.transports.collective import _WAITS, ChannelError
from slimx.reshard.transports.device import DeviceMemory, fetch, opened
from slimx.reshard.transports.landing import bytes_of
from tests.refusals import numbers, refused
from tests.unit.reshard.cuda_stand import DEVICE, use_emulator
from tests.unit.reshard.device_peer import DeviceRank
from tests.unit.reshard.transport_peer import Peer, check

pytestmark = pytest.mark.costly

SIZE = 5000
DEADLINE_S = 3.0


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


def packed_on_device() -> tuple[DeviceMemory, PackedBucket]:
    """A bucket of two tensors in memory of this process's device."""
    tensors = {"matrix": torch.randn(31, 40), "vector": torch.randn(77).bfloat16()}
    memory, places, end = DeviceMemory(12_000), [], 0
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        places.append(PackedTensor(name, kind, tuple(tensor.shape), end, tensor.nbytes, checksum_tensor(tensor)))
        memory.bytes[end : end + tensor.nbytes] = tensor.flatten().view(torch.uint8)
        end = -(-(end + tensor.nbytes) // 64) * 64
    return memory, PackedBucket(memory.path, end, (tuple(places),))


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


def test_a_copy_is_the_readers_own(peers) -> None:
    memory = DeviceMemory(SIZE)
    memory.bytes.fill_(3)
    copy = fetch(memory.path, 10, 20, DEVICE)
    memory.bytes.fill_(4)
    assert copy.tolist() == [3] * 10


def test_a_reader_that_is_killed_with_the_memory_open_leaves_it_to_the_others(peers) -> None:
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
    assert numbers(caught.value) == [2, 719], "the bytes and CUDA's error"
    emulator.emulator_fail(0)
    assert emulator.emulator_open() == 0, "closed after a failure too"
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.join(60)
    with refused("bucket.gone", about=path) as caught:
        fetch(path, 0, 2, DEVICE)
    assert numbers(caught.value)[0] == peer.process.pid


def test_memory_of_another_machine_and_memory_that_is_not_there_are_refused() -> None:
    path = DeviceMemory(SIZE).path
    machine = path.removeprefix("cuda-ipc:").partition("/")[0]
    elsewhere = path.replace(machine, "somewhere-else")
    with refused("bucket.machine", about=elsewhere) as caught:
        fetch(elsewhere, 0, 1, DEVICE)
    assert "publish.transport=nccl" in str(caught.value)
    with refused("device.room", about="publish.bucket_mib") as caught:
        DeviceMemory(1 << 62)
    assert (1 << 62) / 2**20 in numbers(caught.value)


def test_a_channel_brings_a_bucket_from_device_to_device(peers) -> None:
    """The courier opens the publisher's memory, the process beside the engine lands it in its own, the server copies it
    from there. Only the channel itself is NCCL's on GPUs."""
    memory, packed = packed_on_device()
    courier, beside = peers(2)
    meeting = courier.ask("meet", "e0", DEADLINE_S)
    beside.tell("join", meeting, 0)
    assert courier.ask("await_engine") == "joined" and beside.answer() == "joined"
    paths = set()
    for _ in range(2):
        beside.tell("land", packed)
        assert courier.ask("send", packed) == "sent"
        landed = beside.answer()
        assert landed.on_device and landed.path != packed.path
        assert check(landed, 0, fetch(landed.path, 0, landed.size, DEVICE)) == 2
        paths.add(landed.path)
    assert len(paths) == 1, "buckets land in the same memory"
    memory.bytes[packed.tensors[1].offset] ^= 1
    beside.tell("land", packed)
    courier.ask("send", packed)
    landed = beside.answer()
    with refused("peer.checksum", about="vector"):
        check(landed, 0, fetch(landed.path, 0, landed.size, DEVICE))
    beside.process.kill()
    beside.process.join(60)
    assert courier.ask("send", packed) == ["channel.broken", "e0"]
    with bytes_of(packed) as data:
        assert len(data) == packed.size, "the publisher's memory is as it was"


def test_a_group_of_nccl_is_made_to_wait_itself_and_nothing_else_is(monkeypatch) -> None:
    for before in (None, "0"):
        monkeypatch.delenv(_WAITS.VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(_WAITS.VARIABLE, before)
        with pytest.raises(ChannelError), _WAITS.until_done():
            assert os.environ[_WAITS.VARIABLE] == "1"
            raise ChannelError("no group")
        assert os.environ.get(_WAITS.VARIABLE) == before
