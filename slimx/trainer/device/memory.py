"""Peak memory of a trainer rank in each phase of a step: the memory allocated on the GPU, or, for trainers on the CPU,
the resident memory of the process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_PROC = Path("/proc/self")


class CudaMeter:
    """Measures the peak memory of tensors in torch's allocator, excluding the allocator's cache and memory of other
    libraries."""

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class ProcessMeter:
    """Measures the peak resident memory of this process with the kernel's high-water mark (`VmHWM`, proc(5))."""

    def __init__(self, directory: Path = _PROC):
        self.directory = directory
        self.resets = True
        """True if the high-water mark can be reset. False if the kernel does not permit this; then peaks are measured
        from the start of the process."""

    def begin(self) -> None:
        try:
            (self.directory / "clear_refs").write_text("5")
        except OSError:
            self.resets = False

    def peak(self) -> int:
        match = re.search(r"^VmHWM:\s+(\d+) kB", (self.directory / "status").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else 0


Meter = CudaMeter | ProcessMeter
"""Meter of the peak memory, in bytes, since the last call of the method `begin`."""


class PhasePeaks:
    """Peak memory by phase. Time outside of all phases counts as phase `idle`."""

    def __init__(self, meter: Meter, idle: str):
        self.meter = meter
        self.idle = idle
        self._peaks: dict[str, int] = {}
        self._inside = False
        meter.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the memory peak of the `with` block as phase `name`. A block within another phase counts as part of
        the outer phase."""
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
        """Returns {`memory/PHASE_peak_mib`: peak in MiB} for each phase since the last call."""
        self._note(self.idle)
        peaks = self._peaks
        self._peaks = {}
        return {f"memory/{name}_peak_mib": peak / 2**20 for name, peak in peaks.items()}

    def _note(self, name: str) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), self.meter.peak())
        self.meter.begin()


def meter_of(device: torch.device) -> Meter:
    return CudaMeter() if device.type == "cuda" else ProcessMeter()
