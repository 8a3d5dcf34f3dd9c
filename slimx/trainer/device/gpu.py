"""A rank's GPU before and while it trains: faults, free memory, the CPUs beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from slimx.errors import SlimxError
from slimx.trainer.device.nvml import NvmlGpu

MIB = 2**20


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
