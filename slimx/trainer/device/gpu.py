"""The GPU of a trainer rank, queried through NVIDIA's management library (NVML): faults, free memory, and the CPUs near
it."""

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
    """Protocol of NVML's record of a process on a GPU, with the attributes that slimx reads."""

    pid: int
    usedGpuMemory: int | None


@dataclass(frozen=True, slots=True)
class Process:
    """Process that uses memory of the GPU."""

    pid: int
    nbytes: int | None
    """GPU memory that the process uses, in bytes; None if the driver does not report the number, for example for
    processes in other containers."""
    name: str


class NvmlGpu:
    """GPU or MIG slice, queried through NVML. Raises SlimxError on construction if the library or the GPU is not
    available."""

    def __init__(self, uuid: str):
        import pynvml

        self.uuid = uuid
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise SlimxError(
                f"NVML cannot query GPU {uuid} ({error}); run nvidia-smi to see whether the driver responds",
                code="gpu.nvml",
                about=uuid,
            ) from error
        self._events: object = None
        with suppress(pynvml.NVMLError):  # events are not available in every container
            self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def memory(self) -> tuple[int, int]:
        """Returns the free and the total memory of the GPU, in bytes."""
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(info.free), int(info.total)

    def processes(self) -> list[Process]:
        """Returns the processes that use memory of the GPU, as reported by the driver."""
        running: Sequence[_NvmlProcess] = self._query(self._nvml.nvmlDeviceGetComputeRunningProcesses, default=[])
        return [Process(process.pid, process.usedGpuMemory, self._name(process.pid)) for process in running]

    def cpus(self) -> set[int]:
        """Returns the numbers of the CPUs in the GPU's NUMA node; an empty set if NVML does not report any."""
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
        """Returns the number of memory errors that ECC could not correct since the driver was loaded; 0 if ECC is
        off."""
        kind = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        since = self._nvml.NVML_VOLATILE_ECC
        return self._query(self._nvml.nvmlDeviceGetTotalEccErrors, kind, since, default=0)

    def remapped_rows(self) -> tuple[bool, bool]:
        """Returns two flags about defective rows of the GPU's memory: True if rows wait for a reset to be remapped, and
        True if remapping a row has failed."""
        rows = self._query(self._nvml.nvmlDeviceGetRemappedRows, default=(0, 0, False, False))
        return bool(rows[2]), bool(rows[3])

    def throttled(self) -> set[str]:
        """Returns the reasons for which the GPU currently lowers its clocks, but only those that indicate a problem."""
        active = self._query(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, default=0)
        names = {
            self._nvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
            self._nvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
            self._nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
            self._nvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal slowdown",
        }
        return {name for bit, name in names.items() if active & bit}

    def xids(self) -> list[int]:
        """Returns the numbers (XID) of critical errors that the driver has reported since the last call, or since this
        object was created."""
        out: list[int] = []
        with suppress(self._nvml.NVMLError):  # raised as a timeout when there are no more events
            while self._events is not None:
                out.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
        return out

    def _query[T](self, function: Callable[..., T], *arguments: object, default: T) -> T:
        """Calls the NVML function `function` for this GPU and returns its result, or `default` if the call fails."""
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
    """Returns the GPU or MIG slice of a torch device. Identifies it by UUID, because each rank sees only its own GPU,
    as number 0. Raises SlimxError if NVML does not find it."""
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
    """Checks that a GPU can be used for a run. Raises SlimxError if the GPU's memory is defective; returns warnings
    about lowered clocks."""
    pending, failed = gpu.remapped_rows()
    if failed:
        raise SlimxError(
            f"GPU {gpu.uuid} has defective memory rows that could not be remapped; replace the GPU, and run without "
            "its node until then",
            code="gpu.remapping_failed",
            about=gpu.uuid,
        )
    if pending:
        raise SlimxError(
            f"GPU {gpu.uuid} has defective memory rows that are remapped only by a reset; reset the GPU before the run",
            code="gpu.remapping_pending",
            about=gpu.uuid,
        )
    errors = gpu.uncorrected_errors()
    if errors:
        raise SlimxError(
            f"GPU {gpu.uuid} has had memory errors that ECC could not correct ({errors} since the driver was loaded); "
            "reset the GPU, and replace the GPU if such errors recur",
            code="gpu.memory_errors",
            about=gpu.uuid,
        )
    refuse_xids(gpu)
    reasons = sorted(gpu.throttled())
    if not reasons:
        return ()
    return (f"{gpu.uuid} has lowered its clocks: {', '.join(reasons)}",)


def refuse_xids(gpu: NvmlGpu) -> None:
    """Raises SlimxError if the driver has reported critical errors since the last check."""
    xids = gpu.xids()
    if xids:
        raise SlimxError(
            f"the driver has reported XID {', '.join(map(str, xids))} for GPU {gpu.uuid}; look up these XID errors in "
            "NVIDIA's XID catalog and in the output of dmesg",
            code="gpu.xid",
            about=gpu.uuid,
        )


def set_affinity(
    gpu: NvmlGpu,
    allowed: set[int] | None = None,
    apply: Callable[[int, set[int]], None] = os.sched_setaffinity,
) -> set[int]:
    """Restricts this process to the CPUs in the GPU's NUMA node, and returns the CPUs that it may use afterwards.
    `allowed`: CPUs that it may use beforehand (default: its current affinity). If none of these CPUs is in the NUMA
    node, as in a small cgroup, nothing changes. `apply`: function that sets the affinity."""
    present = os.sched_getaffinity(0) if allowed is None else allowed
    near = gpu.cpus() & present
    if not near:
        return present
    apply(0, near)
    return near


class MemoryGuard:
    """Guard that checks before a training step that the GPU has enough free memory."""

    def __init__(self, gpu: NvmlGpu, margin: int, *, free_caches: Callable[[], None]):
        """Sets the limits of the check. `margin`: number of bytes that must be free; 0 disables the check.
        `free_caches`: function that releases unused memory of torch's allocator."""
        self.gpu = gpu
        self.margin = margin
        self.free_caches = free_caches
        self.freed = 0
        """Number of checks that had to free the allocator's caches."""

    def check(self, local: Mapping[str, int]) -> None:
        """Raises SlimxError if less memory than the margin is free even after freeing caches, or if the driver has
        reported critical errors. The message names the largest processes on the GPU, and the memory of this rank.
        `local`: this rank's memory in bytes by kind."""
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
            f"GPU {self.gpu.uuid} has only {_mib(free)} of {_mib(total)} free even after freeing caches, less than "
            f"trainer.memory_margin_mib={self.margin // MIB} (processes on it: "
            f"{', '.join(users) or 'none that NVML shows'}; memory of this rank: {', '.join(kinds) or 'none'}); lower "
            "trainer.max_tokens_per_microbatch, set trainer.offload_activations, or end other processes on the GPU",
            code="gpu.memory_margin",
            about=self.gpu.uuid,
        )


def largest(named: Mapping[str, int], count: int = 3) -> dict[str, int]:
    """Returns the `count` largest entries of `named`, a dict of sizes in bytes by name."""
    return dict(sorted(named.items(), key=lambda item: -item[1])[:count])


def _mib(nbytes: int | None) -> str:
    return "an unknown size" if nbytes is None else f"{nbytes / MIB:,.0f} MiB"
