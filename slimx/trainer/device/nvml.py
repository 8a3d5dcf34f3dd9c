"""One GPU as NVIDIA's management library (NVML) sees it: the few questions that slimx asks, by nvidia-ml-py."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True)
class Process:
    """A process with memory on the GPU."""

    pid: int
    nbytes: int | None
    """None: the driver does not tell (in containers, for processes of others)."""
    name: str


class NvmlGpu:
    """One GPU, asked by NVML. Raises SlimxError if the library or the GPU is not there."""

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
        """Free and total bytes."""
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(info.free), int(info.total)

    def processes(self) -> list[Process]:
        """Processes with memory on it, as far as the driver tells."""
        found = self._asked(self._nvml.nvmlDeviceGetComputeRunningProcesses, otherwise=[])
        return [Process(each.pid, each.usedGpuMemory, self._name(each.pid)) for each in found]

    def cpus(self) -> set[int]:
        """CPUs of the GPU's NUMA node; empty if they cannot be told."""
        words, scope = ((os.cpu_count() or 1) + 63) // 64, self._nvml.NVML_AFFINITY_SCOPE_NODE
        mask = self._asked(self._nvml.nvmlDeviceGetCpuAffinityWithinScope, words, scope, otherwise=())
        return {64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if bits >> bit & 1}

    def uncorrected_errors(self) -> int:
        """Memory errors since the driver was loaded that ECC could not repair; 0 where ECC is off."""
        kind, since = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        return self._asked(self._nvml.nvmlDeviceGetTotalEccErrors, kind, since, otherwise=0)

    def remapped_rows(self) -> tuple[bool, bool]:
        """Two flags: rows wait for a reset to be remapped; a remapping failed."""
        rows = self._asked(self._nvml.nvmlDeviceGetRemappedRows, otherwise=(0, 0, False, False))
        return bool(rows[2]), bool(rows[3])

    def throttled(self) -> set[str]:
        """Reasons that mean trouble and for which the clocks are lowered now."""
        now = self._asked(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, otherwise=0)
        names = {
            self._nvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
            self._nvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
            self._nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
            self._nvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal slowdown",
        }
        return {name for bit, name in names.items() if now & bit}

    def xids(self) -> list[int]:
        """Critical errors (XID) that the driver reported since the last call; at the first call, since it was made."""
        out: list[int] = []
        with suppress(self._nvml.NVMLError):  # a timeout: there is no more
            while self._events is not None:
                out.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
        return out

    def _asked(self, question: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
        """The answer to one of NVML's questions about this GPU; `otherwise` where it has none."""
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError:
            return otherwise

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
