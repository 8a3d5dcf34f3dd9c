"""One GPU as NVIDIA's management library (NVML) sees it: the few questions that slimx asks, by nvidia-ml-py."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True)
class Process:
    """A process with memory on the GPU."""

    pid: int
    nbytes: int | None
    """None: the driver does not tell (in containers, for processes of others)."""
    name: str


class GpuQueries(Protocol):
    """The questions that slimx asks of a GPU; tests answer with faults that no real part has on demand."""

    uuid: str

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        ...

    def processes(self) -> list[Process]: ...

    def cpus(self) -> set[int]:
        """CPUs of the GPU's NUMA node."""
        ...

    def uncorrected_errors(self) -> int:
        """Memory errors since the driver was loaded that ECC could not repair; 0 where ECC is off."""
        ...

    def remapped_rows(self) -> tuple[bool, bool]:
        """Two flags: rows wait for a reset to be remapped; a remapping failed."""
        ...

    def throttled(self) -> set[str]:
        """Reasons that mean trouble and for which the clocks are lowered now."""
        ...

    def xids(self) -> list[int]:
        """Critical errors (XID) that the driver reported since the last call; at the first call, since it was made."""
        ...


class NvmlGpu:
    """Answers for one GPU by NVML. Raises SlimxError if the library or the GPU is not there."""

    def __init__(self, uuid: str):
        import pynvml

        self.uuid, self._nvml = uuid, pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise SlimxError(
                f"NVML does not answer for {uuid} ({error}); look at the NVIDIA driver", code="gpu.nvml", about=uuid
            ) from error
        self._events: Any = None
        with suppress(pynvml.NVMLError):  # not in every container
            self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def memory(self) -> tuple[int, int]:
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(info.free), int(info.total)

    def processes(self) -> list[Process]:
        nvml = self._nvml
        try:
            found = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except nvml.NVMLError:
            return []
        return [Process(each.pid, each.usedGpuMemory, self._name(each.pid)) for each in found]

    def cpus(self) -> set[int]:
        nvml = self._nvml
        words = ((os.cpu_count() or 1) + 63) // 64
        try:
            mask = nvml.nvmlDeviceGetCpuAffinityWithinScope(self._handle, words, nvml.NVML_AFFINITY_SCOPE_NODE)
        except nvml.NVMLError:
            return set()
        return {64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if bits >> bit & 1}

    def uncorrected_errors(self) -> int:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetTotalEccErrors(
                self._handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        except nvml.NVMLError:
            return 0

    def remapped_rows(self) -> tuple[bool, bool]:
        try:
            _, _, pending, failed = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        except self._nvml.NVMLError:
            return False, False
        return bool(pending), bool(failed)

    def throttled(self) -> set[str]:
        nvml = self._nvml
        try:
            now = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        except nvml.NVMLError:
            return set()
        names = {
            nvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
            nvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
            nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
            nvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal slowdown",
        }
        return {name for bit, name in names.items() if now & bit}

    def xids(self) -> list[int]:
        out: list[int] = []
        while self._events is not None:
            try:
                out.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
            except self._nvml.NVMLError:  # a timeout: there is none
                break
        return out

    def _name(self, pid: int) -> str:
        try:
            name = self._nvml.nvmlSystemGetProcessName(pid)
        except self._nvml.NVMLError:
            return "a process of another container"
        return name.decode() if isinstance(name, bytes) else str(name)


def gpu_of(device: Any) -> NvmlGpu:
    """The GPU, or the slice of one (MIG), behind a torch device. Ranks see their own as number 0, so it is found by its
    UUID. Raises SlimxError if NVML does not know it."""
    import torch

    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        return NvmlGpu(f"GPU-{uuid}")
    except SlimxError as error:
        try:
            return NvmlGpu(f"MIG-{uuid}")
        except SlimxError:
            raise error from None
