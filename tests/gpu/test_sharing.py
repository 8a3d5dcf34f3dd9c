"""Memory of a GPU that processes share by handle: others write into it and copy from it, and one of them may die."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.transports.device import DeviceMemory, fetch, opened
from tests.gpu.plans import random_plan
from tests.gpu.receiving import SIZE, proves_and_holds
from tests.gpu.running import FILL, on_cpu
from tests.refusals import numbers, refusal_fields

MIB = 2**20
ROOT = Path(__file__).parents[2]


class Peer:
    """Another process with a GPU: it answers one JSON line for each that it reads."""

    def __init__(self, gpus: str | None = None):
        """Starts the process; `gpus`: its CUDA_VISIBLE_DEVICES, this process's by default."""
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, method: str, *arguments: Any) -> None:
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 90) -> Any:
        assert select.select([self.process.stdout], [], [], seconds)[0], "the peer did not answer"
        line = self.process.stdout.readline()
        assert line, f"the peer ended with status {self.process.wait()}"
        return json.loads(line)

    def ask(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class PeerDevice:
    """Operations of a peer on its GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.kept: list[Any] = []

    def ready(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def allocate(self, size: int, value: int) -> str:
        self.kept.append(memory := DeviceMemory(size, self.device))
        memory.bytes.fill_(value)
        torch.cuda.synchronize()
        return memory.path

    def hold(self, path: str, size: int) -> str:
        """Opens it and never closes it."""
        self.kept.append(one := opened(path, size, self.device))
        one.__enter__()
        return "held"

    def checksum(self, path: str, start: int, stop: int) -> str:
        """Returns the checksum of a copy of these bytes."""
        return f"{kernel.checksum_tensor(fetch(path, start, stop, self.device).cpu()):016x}"

    def pack(self, path: str, seed: int) -> list[int]:
        """Packs a random plan from this process's memory into another's; returns its sums."""
        plan = random_plan(seed, tensors=40)
        sources = torch.from_numpy(plan.memory).to(self.device)
        names = [f"tensor {number}" for number in range(plan.tensors)]
        pieces, size = plan.at(sources.data_ptr()), plan.bucket_bytes
        device_plan = DevicePlan(pieces, bucket_bytes=size, names=names, bucket="shared", device=self.device)
        sums = torch.zeros(plan.tensors, dtype=torch.int64, device=self.device)
        flags = torch.zeros(plan.tensors, dtype=torch.int32, device=self.device)
        with opened(path, size, self.device) as address:
            kernel_cuda.pack_at(device_plan, address, sums, flags)
            found = kernel_cuda.results(device_plan, sums)
        return found.tolist()


def serve() -> None:
    """Calls a method of `PeerDevice` for each line of the input; a refusal is answered by code, object and sentence."""
    device = PeerDevice()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            out = getattr(device, method)(*arguments)
        except SlimxError as error:
            out = refusal_fields(error)
        print(json.dumps(out), flush=True)


@pytest.fixture
def peer(device: torch.device) -> Iterator[Peer]:
    one = Peer()
    assert one.ask("ready") == str(torch.cuda.get_device_properties(device).uuid)
    yield one
    one.kill()


def checksum(memory: torch.Tensor) -> str:
    return f"{kernel.checksum_tensor(memory.cpu()):016x}"


def test_another_process_packs_into_it_what_the_cpu_packs(device: torch.device, peer: Peer) -> None:
    plan = random_plan(3, tensors=40)
    memory, right = DeviceMemory(plan.bucket_bytes, device), on_cpu(plan)
    memory.bytes.fill_(FILL)
    torch.cuda.synchronize()
    assert peer.ask("pack", memory.path, 3) == right.sums.tolist()
    assert memory.bytes.cpu().numpy().tolist() == right.bucket.tolist()
    memory.close()


def test_another_process_copies_from_shared_memory(device: torch.device, peer: Peer) -> None:
    memory = DeviceMemory(64 * MIB + 3, device)
    memory.bytes.copy_(torch.randint(0, 256, (memory.size,), dtype=torch.uint8, device=device))
    torch.cuda.synchronize()
    for start, stop in ((0, memory.size), (5, 6), (MIB + 1, 3 * MIB)):
        assert peer.ask("checksum", memory.path, start, stop) == checksum(memory.bytes[start:stop])
    with opened(memory.path, memory.size, device) as address:
        assert address == memory.address
    code, about, sentence = peer.ask("checksum", memory.path, 0, memory.size + 1)
    assert (code, about) == ("bucket.size", memory.path) and {67108867, 67108868} <= {*numbers(sentence)}
    path = memory.path
    memory.close()
    assert peer.ask("checksum", path, 0, 1)[:2] == ["bucket.gone", path]


def test_a_reader_that_is_killed_with_it_open_costs_no_memory(device: torch.device, peer: Peer) -> None:
    memory = DeviceMemory(256 * MIB, device)
    memory.bytes.fill_(1)
    torch.cuda.synchronize()
    assert peer.ask("hold", memory.path, memory.size) == "held"
    peer.kill()
    before, _ = torch.cuda.mem_get_info(device)
    memory.close()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(device)[0] - before >= 256 * MIB


def test_a_killed_owner_ends_a_readers_copy_by_name_or_not_at_all(device: torch.device, peer: Peer) -> None:
    """CUDA leaves it undefined; whatever a driver does, the reader gets an error or has the bytes."""
    path, reader = peer.ask("allocate", MIB, 7), Peer()
    try:
        assert reader.ask("hold", path, MIB) == "held"
        peer.kill()
        found = reader.ask("checksum", path, 0, MIB)
        right = checksum(torch.full((MIB,), 7, dtype=torch.uint8))
        assert found == right or found[:2] in (["bucket.gone", path], ["device.copy", path])
        print("after its owner's death:", "the bytes" if found == right else found)
    finally:
        reader.kill()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("gpus", ["1", "1,0"])
def test_processes_with_other_gpu_numbers_reach_the_owners_memory(device, gpus) -> None:
    peer, memory = Peer(gpus), DeviceMemory(8 * MIB, device)
    try:
        assert peer.ask("ready") != str(torch.cuda.get_device_properties(device).uuid)
        memory.bytes.fill_(FILL)
        torch.cuda.synchronize()
        assert peer.ask("checksum", memory.path, 3, 8 * MIB) == checksum(memory.bytes[3:])
        plan = random_plan(4, tensors=40)
        assert plan.bucket_bytes <= memory.size and peer.ask("pack", memory.path, 4) == on_cpu(plan).sums.tolist()
        assert memory.bytes[: plan.bucket_bytes].tolist() == on_cpu(plan).bucket.tolist()
    finally:
        peer.kill()
        memory.close()


def test_a_receiver_proves_and_holds_what_a_bucket_on_the_device_brings(device: torch.device) -> None:
    proves_and_holds(DeviceMemory(SIZE, device), device)


def test_the_cost_of_opening_copying_and_closing_is_printed(device: torch.device, peer: Peer) -> None:
    """Printed, not claimed: a bucket is opened anew each time."""
    size = 512 * MIB
    path = peer.ask("allocate", size, 1)
    assert fetch(path, 0, size, device).sum().item() == size
    begin = time.perf_counter()
    for _ in range(5):
        fetch(path, 0, size, device)
    both = (time.perf_counter() - begin) / 5
    begin = time.perf_counter()
    for _ in range(20):
        with opened(path, size, device):
            pass
    alone = (time.perf_counter() - begin) / 20
    print(f"open, copy 512 MiB, close: {both * 1e3:.2f} ms, of which open and close {alone * 1e3:.2f} ms")
