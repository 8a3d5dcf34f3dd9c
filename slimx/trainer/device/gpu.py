"""A rank's GPU before and during training, through NVIDIA's management library (NVML): faults, free memory, nearby
CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slimx.errors import SlimxError

if TYPE_CHECKING:
    import torch

MIB = 2**20


class _NvmlProcess(Protocol):
    """NVML's record of a process on a GPU."""

    pid: int
    usedGpuMemory: int | None


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses memory on the GPU."""

    pid: int
    nbytes: int | None
    """None if the driver does not report it (in containers, for processes of other containers)."""
    name: str


class NvmlGpu:
    """One GPU, queried through NVML. Construction raises SlimxError if the library or the GPU is not available."""

    def __init__(self, uuid: str):
        import pynvml

        self.uuid = uuid
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise SlimxError(
                f"NVML does not respond for {uuid} ({error}); check the NVIDIA driver", code="gpu.nvml", about=uuid
            ) from error
        self._events: object = None
        with suppress(pynvml.NVMLError):  # not in every container
            self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def memory(self) -> tuple[int, int]:
        """Returns free and total bytes."""
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(info.free), int(info.total)

    def processes(self) -> list[Process]:
        """Lists processes with memory on the GPU, as far as the driver reports them."""
        running: Sequence[_NvmlProcess] = self._query(self._nvml.nvmlDeviceGetComputeRunningProcesses, default=[])
        return [Process(process.pid, process.usedGpuMemory, self._name(process.pid)) for process in running]

    def cpus(self) -> set[int]:
        """Returns the CPUs of the GPU's NUMA node; empty if unknown."""
        words = ((os.cpu_count() or 1) + 63) // 64
        scope = self._nvml.NVML_AFFINITY_SCOPE_NODE
        mask: Sequence[int] = self._query(self._nvml.nvmlDeviceGetCpuAffinityWithinScope, words, scope, default=())
        cpus = set()
        for word, bits in enumerate(mask):
            for bit in range(64):
                if bits >> bit & 1:
                    cpus.add(64 * word + bit)
        return cpus

    def uncorrected_errors(self) -> int:
        """Counts memory errors since the driver was loaded that ECC could not correct; 0 if ECC is off."""
        kind = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        since = self._nvml.NVML_VOLATILE_ECC
        return self._query(self._nvml.nvmlDeviceGetTotalEccErrors, kind, since, default=0)

    def remapped_rows(self) -> tuple[bool, bool]:
        """Returns two flags: rows wait for a reset to be remapped; a remapping failed."""
        rows = self._query(self._nvml.nvmlDeviceGetRemappedRows, default=(0, 0, False, False))
        return bool(rows[2]), bool(rows[3])

    def throttled(self) -> set[str]:
        """Returns the reasons for which clocks are currently lowered, out of those that indicate a problem."""
        active = self._query(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, default=0)
        names = {
            self._nvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
            self._nvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
            self._nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
            self._nvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal slowdown",
        }
        return {name for bit, name in names.items() if active & bit}

    def xids(self) -> list[int]:
        """Returns critical errors (XID) that the driver reported since the last call (first call: since creation)."""
        out: list[int] = []
        with suppress(self._nvml.NVMLError):  # a timeout: there are no more
            while self._events is not None:
                out.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
        return out

    def _query[T](self, function: Callable[..., T], *arguments: object, default: T) -> T:
        """Returns the result of an NVML function for this GPU; `default` if NVML cannot provide it."""
        try:
            return function(self._handle, *arguments)
        except self._nvml.NVMLError:
            return default

    def _name(self, pid: int) -> str:
        try:
            name = self._nvml.nvmlSystemGetProcessName(pid)
        except self._nvml.NVMLError:
            return "a process of another container"
        return name.decode() if isinstance(name, bytes) else str(name)


def gpu_of(device: torch.device) -> NvmlGpu:
    """Returns the GPU, or the MIG slice, behind a torch device. Each rank sees its GPU as number 0, so it is identified
    by UUID. Raises SlimxError if NVML does not find it."""
    import torch

    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        return NvmlGpu(f"GPU-{uuid}")
    except SlimxError as error:
        try:
            return NvmlGpu(f"MIG-{uuid}")
        except SlimxError:
            raise error from None


def check_health(gpu: NvmlGpu) -> tuple[str, ...]:
    """Checks that a GPU is fit for a run: raises SlimxError for broken memory, returns warnings of lowered clocks."""
    pending, failed = gpu.remapped_rows()
    if failed:
        raise SlimxError(
            f"{gpu.uuid}: remapping broken memory rows failed; the GPU must be replaced, start without this node",
            code="gpu.remapping_failed",
            about=gpu.uuid,
        )
    if pending:
        raise SlimxError(
            f"{gpu.uuid}: broken memory rows wait to be remapped; reset the GPU before the run",
            code="gpu.remapping_pending",
            about=gpu.uuid,
        )
    errors = gpu.uncorrected_errors()
    if errors:
        raise SlimxError(
            f"{gpu.uuid}: {errors} memory errors that ECC could not correct since the driver was loaded; reset the "
            "GPU, and replace it if they return",
            code="gpu.memory_errors",
            about=gpu.uuid,
        )
    refuse_xids(gpu)
    reasons = sorted(gpu.throttled())
    if not reasons:
        return ()
    return (f"{gpu.uuid} runs below its clocks: {', '.join(reasons)}",)


def refuse_xids(gpu: NvmlGpu) -> None:
    """Raises SlimxError if the driver has reported a critical error."""
    xids = gpu.xids()
    if xids:
        numbers = ", ".join(map(str, xids))
        raise SlimxError(
            f"{gpu.uuid}: the driver reports XID {numbers}; look it up in NVIDIA's XID catalogue and dmesg",
            code="gpu.xid",
            about=gpu.uuid,
        )


def set_affinity(
    gpu: NvmlGpu,
    allowed: set[int] | None = None,
    apply: Callable[[int, set[int]], None] = os.sched_setaffinity,
) -> set[int]:
    """Restricts this process to the CPUs of the GPU's NUMA node; returns the CPUs that it may then use.

    `allowed`: CPUs that it may use now; if none of them is on that node (a small cgroup), nothing changes.
    """
    present = os.sched_getaffinity(0) if allowed is None else allowed
    near = gpu.cpus() & present
    if not near:
        return present
    apply(0, near)
    return near


class MemoryGuard:
    """Refuses training with less than a margin of free GPU memory."""

    def __init__(self, gpu: NvmlGpu, margin: int, *, free_caches: Callable[[], None]):
        """Takes `margin`: bytes that must be free; 0: no check. `free_caches`: releases the allocator's unused
        memory."""
        self.gpu = gpu
        self.margin = margin
        self.free_caches = free_caches
        self.freed = 0
        """Number of times that caches had to be freed."""

    def check(self, local: Mapping[str, int]) -> None:
        """Raises SlimxError naming the largest users: processes by NVML, and `local` bytes of this rank by kind."""
        refuse_xids(self.gpu)
        if self.margin == 0 or self.gpu.memory()[0] >= self.margin:
            return
        self.free_caches()
        self.freed += 1
        free, total = self.gpu.memory()
        if free >= self.margin:
            return
        processes = sorted(self.gpu.processes(), key=lambda process: -(process.nbytes or 0))[:4]
        users = [f"{process.name} (pid {process.pid}) {_mib(process.nbytes)}" for process in processes]
        by_size = sorted(local.items(), key=lambda item: -item[1])
        kinds = []
        for kind, size in by_size:
            if size:
                kinds.append(f"{kind} {_mib(size)}")
        raise SlimxError(
            f"{self.gpu.uuid} has {_mib(free)} of {_mib(total)} free even after freeing caches, less than "
            f"trainer.memory_margin_mib {self.margin // MIB}; processes on it: "
            f"{', '.join(users) or 'none that NVML shows'}; memory of this rank: {', '.join(kinds) or 'none'}; lower "
            "trainer.max_tokens_per_microbatch, offload more, or end the other processes",
            code="gpu.memory_margin",
            about=self.gpu.uuid,
        )


def largest(named: Mapping[str, int], count: int = 3) -> dict[str, int]:
    """Returns the `count` largest of tensors by name (bytes)."""
    return dict(sorted(named.items(), key=lambda item: -item[1])[:count])


def _mib(nbytes: int | None) -> str:
    return "an unknown size" if nbytes is None else f"{nbytes / MIB:,.0f} MiB"
