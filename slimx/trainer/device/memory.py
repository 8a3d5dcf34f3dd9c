"""Peak memory of one trainer rank by phase: what the device allocated, or what the process had resident on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_PROC = Path("/proc/self")


class CudaMeter:
    """Memory that torch's allocator gave out (not what it caches, nor what libraries take beside it)."""

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class ProcessMeter:
    """Resident memory of this process, by the kernel's own high-water mark (`VmHWM`, proc(5))."""

    def __init__(self, directory: Path = _PROC):
        self.directory = directory
        self.resets = True
        """The mark can be set back; where the kernel refuses that, peaks are those since the start."""

    def begin(self) -> None:
        try:
            (self.directory / "clear_refs").write_text("5")
        except OSError:
            self.resets = False

    def peak(self) -> int:
        found = re.search(r"^VmHWM:\s+(\d+) kB", (self.directory / "status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0


Meter = CudaMeter | ProcessMeter
"""Measures the highest use of memory, in bytes, since `begin` was last called."""


class PhaseMemory:
    """Peaks by phase. Time that is in no phase of its own belongs to `idle`."""

    def __init__(self, meter: Meter, idle: str):
        self.meter, self.idle = meter, idle
        self._peaks: dict[str, int] = {}
        self._inside = False
        meter.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of work; one inside another counts as the outer one."""
        if self._inside:
            yield
            return
        self._note(self.idle)
        self._inside = True
        try:
            yield
        finally:
            self._note(name)
            self._inside = False

    def take(self) -> dict[str, float]:
        """Return `memory/PHASE_peak_mib` since the last call, in MiB."""
        self._note(self.idle)
        peaks, self._peaks = self._peaks, {}
        return {f"memory/{name}_peak_mib": peak / 2**20 for name, peak in peaks.items()}

    def _note(self, name: str) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), self.meter.peak())
        self.meter.begin()


def meter_of(device: torch.device) -> Meter:
    return CudaMeter() if device.type == "cuda" else ProcessMeter()
