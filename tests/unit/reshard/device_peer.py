"""A process beside the emulated device's owner: another trainer rank, an engine's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from slimx.reshard.transports.device import DeviceMemory, fetch, opened
from tests.unit.reshard.cuda_stand import DEVICE, memory_at, use_emulator
from tests.unit.reshard.transport_peer import Rank


class DeviceRank(Rank):
    """Answers in another process; `emulate` first."""

    def emulate(self, library: str) -> str:
        self.library: ctypes.CDLL = use_emulator(Path(library), pytest.MonkeyPatch())
        self.memory = None
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
