"""A process beside the emulated device's owner: another trainer rank, a courier, the process beside an engine."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.collective import Meeting, Sending
from slimx.reshard.transports.device import DeviceMemory, fetch, opened
from slimx.reshard.transports.landing import Landing, bytes_of
from tests.unit.reshard.cuda_stand import DEVICE, memory_at, use_emulator
from tests.unit.reshard.transport_peer import Rank


class DeviceRank(Rank):
    """Answers in another process; `emulate` first."""

    def emulate(self, library: str) -> str:
        self.library: ctypes.CDLL = use_emulator(Path(library), pytest.MonkeyPatch())
        self.landing, self.memory = Landing(), None
        return "ready"

    def allocate(self, size: int, value: int) -> str:
        """Memory of its own, filled; its path."""
        self.memory = DeviceMemory(size)
        self.memory.bytes.fill_(value)
        return self.memory.path

    def write(self, path: str, size: int, value: int) -> int:
        """Fill another process's memory; how many it has open afterwards."""
        with opened(path, size) as address:
            memory_at(address, size, DEVICE).fill_(value)
        return self.library.emulator_open()

    def fetch(self, path: str, start: int, stop: int) -> list[int]:
        return fetch(path, start, stop, DEVICE).tolist()

    def hold(self, path: str) -> str:
        """Open it and never close it."""
        opened(path, 1).__enter__()
        return "held"

    # Two ends of a channel -------------------------------------------------------------------------------------------

    def meet(self, engine: str, deadline_s: float) -> Meeting:
        self.opening = Sending.open(engine, 3, ranks=1, host="127.0.0.1", backend="gloo", deadline_s=deadline_s)
        return self.opening.meeting

    def await_engine(self) -> str:
        self.sending = self.opening.join()
        return "joined"

    def send(self, packed: PackedBucket) -> str:
        with bytes_of(packed) as data:
            self.sending.broadcast(data)
        return "sent"

    def land(self, packed: PackedBucket) -> PackedBucket:
        """What arrives next, where it landed."""
        with self.landing.of(packed) as (landed, memory):
            memory.fill_(0)
            self.channel.receive(memory)
            return landed
