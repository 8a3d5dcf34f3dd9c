"""Peak memory of a trainer rank by phase: allocated on the device, or resident in the process on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_PROC = Path("/proc/self")


class CudaMeter:
    """Meter of memory that torch's allocator handed out, without its cache and without memory of other libraries."""

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class ProcessMeter:
    """Meter of this process's resident memory, by the kernel's high-water mark (`VmHWM`, proc(5))."""

    def __init__(self, directory: Path = _PROC):
        self.directory = directory
        self.resets = True
        """True if the mark can be reset; if the kernel refuses, peaks are those since the start."""

    def begin(self) -> None:
        try:
            (self.directory / "clear_refs").write_text("5")
        except OSError:
            self.resets = False

    def peak(self) -> int:
        match = re.search(r"^VmHWM:\s+(\d+) kB", (self.directory / "status").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else 0


Meter = CudaMeter | ProcessMeter
"""Measures peak memory, in bytes, since the last call of `begin`."""


class PhasePeaks:
    """Peaks by phase. Time outside of all phases belongs to `idle`."""

    def __init__(self, meter: Meter, idle: str):
        self.meter = meter
        self.idle = idle
        self._peaks: dict[str, int] = {}
        self._inside = False
        meter.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts a phase of work; a nested phase counts as the outer one."""
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
        """Returns `memory/PHASE_peak_mib` since the last call, in MiB."""
        self._note(self.idle)
        peaks = self._peaks
        self._peaks = {}
        return {f"memory/{name}_peak_mib": peak / 2**20 for name, peak in peaks.items()}

    def _note(self, name: str) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), self.meter.peak())
        self.meter.begin()


def meter_of(device: torch.device) -> Meter:
    return CudaMeter() if device.type == "cuda" else ProcessMeter()
