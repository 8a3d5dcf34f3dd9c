"""A rank's GPU before and while it trains, by NVIDIA's management library (NVML): faults, free memory, the CPUs beside
it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slimx.errors import SlimxError

MIB = 2**20


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


def check_health(gpu: NvmlGpu) -> tuple[str, ...]:
    """Check that a GPU is fit for a run: raises SlimxError for broken memory, returns warnings of what slows it."""
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
    if errors := gpu.uncorrected_errors():
        raise SlimxError(
            f"{gpu.uuid}: {errors} memory errors that ECC could not repair since the driver was loaded; reset the GPU, "
            "and replace it if they come back",
            code="gpu.memory_errors",
            about=gpu.uuid,
        )
    refuse_xids(gpu)
    reasons = sorted(gpu.throttled())
    return (f"{gpu.uuid} runs below its clocks: {', '.join(reasons)}",) if reasons else ()


def refuse_xids(gpu: NvmlGpu) -> None:
    """Raises SlimxError if the driver has reported a critical error."""
    if xids := gpu.xids():
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
    """Let this process run on the CPUs of the GPU's NUMA node only; returns those it may use then.

    `allowed`: CPUs that it may use now; where none of them is near (a small cgroup), nothing changes.
    """
    present = os.sched_getaffinity(0) if allowed is None else allowed
    near = gpu.cpus() & present
    if not near:
        return present
    apply(0, near)
    return near


class MemoryGuard:
    """Refuses to train with less than a margin of free memory on the GPU."""

    def __init__(self, gpu: NvmlGpu, margin: int, *, free_caches: Callable[[], None]):
        """`margin`: bytes that must be free; 0: no check. `free_caches`: gives back what the allocator holds unused."""
        self.gpu, self.margin, self.free_caches = gpu, margin, free_caches
        self.freed = 0
        """Times that the caches had to be freed."""

    def check(self, own: Mapping[str, int]) -> None:
        """Raises SlimxError naming the biggest holders: processes by NVML, and `own` bytes of this rank by kind."""
        refuse_xids(self.gpu)
        if self.margin == 0 or self.gpu.memory()[0] >= self.margin:
            return
        self.free_caches()
        self.freed += 1
        free, total = self.gpu.memory()
        if free >= self.margin:
            return
        processes = sorted(self.gpu.processes(), key=lambda process: -(process.nbytes or 0))[:4]
        holders = [f"{p.name} (pid {p.pid}) {_mib(p.nbytes)}" for p in processes]
        kinds = [f"{kind} {_mib(size)}" for kind, size in sorted(own.items(), key=lambda item: -item[1]) if size]
        raise SlimxError(
            f"{self.gpu.uuid} has {_mib(free)} of {_mib(total)} free, less than trainer.memory_margin_mib "
            f"{self.margin // MIB}, with caches freed; on it: {', '.join(holders) or 'no process that NVML shows'}; of "
            f"this rank: {', '.join(kinds) or 'nothing'}; lower trainer.max_tokens_per_microbatch, offload more, or "
            "end the other processes",
            code="gpu.memory_margin",
            about=self.gpu.uuid,
        )


def largest(named: Mapping[str, int], count: int = 3) -> dict[str, int]:
    """The `count` largest of tensors by name (bytes)."""
    return dict(sorted(named.items(), key=lambda item: -item[1])[:count])


def _mib(nbytes: int | None) -> str:
    return "an unknown size" if nbytes is None else f"{nbytes / MIB:,.0f} MiB"
