"""`slimx health`: checks whether this node is fit for a run.

A launcher calls it on every node before it starts anything. It checks for conditions that would make a run fail hours
later (memory errors, a GPU that has fallen off the bus, a full disk, a wrong clock). It imports neither torch nor Ray,
so that hundreds of nodes can be checked within seconds."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimx.errors import SlimxError
from slimx.trainer.device.gpu import NvmlGpu, check_health

GIB = 2**30
XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140, 143})
"""NVIDIA's error numbers (XIDs) after which its catalog (docs.nvidia.com/deploy/xid-errors) requires a reset or
replacement of the GPU: memory (48, 64, 95, 140), NVLink (74), GPU fallen off the bus (79), internal processors (62,
119, 120, 143). Other errors are caused by programs, or are counted by NVML."""
IBGDA = {"NVreg_EnableStreamMemOPs=1": r"^EnableStreamMemOPs: 1$", "PeerMappingOverride=1": r"PeerMappingOverride=1"}
"""Options of NVIDIA's kernel module that allow GPU-initiated InfiniBand transfers, which DeepEP uses between nodes
(docs.nvidia.com/nvshmem, installation guide). Each has a pattern that matches the driver's output if the option is
set."""
XID_LINE = re.compile(r"NVRM: Xid \((PCI:[^)]+)\): (\d+)")
RECENT_S = 3600.0
"""Maximum age in seconds at which an error in the kernel log is reported. The log outlives repairs, so the cause of an
older error may have been repaired."""


@dataclass(frozen=True, slots=True)
class NodeRequirements:
    """Requirements of a run that each of its nodes must satisfy."""

    gpus: int = 0
    """Number of GPUs that must be present and healthy."""
    disk_gib: float = 5.0
    """Free space in GiB that is needed on the disk of each of `paths`."""
    shm_gib: float = 1.0
    """Free space in GiB that is needed in /dev/shm, for Ray's object store and NCCL."""
    paths: Sequence[Path] = (Path("/tmp"), Path())
    hcas: Sequence[str] = ()
    """Names of InfiniBand or RoCE adapters that must have an active port."""
    clock: float | None = None
    """Reading of the launcher's clock at the start of the check, in seconds since the epoch; None: the clock is not
    checked."""
    skew_s: float = 60.0
    """Maximum deviation of this node's clock from the launcher's, in seconds. A slow start of the check adds to the
    deviation."""


@dataclass(frozen=True, slots=True)
class Places:
    """Paths and clocks that the checks read; tests replace them."""

    infiniband: Path = Path("/sys/class/infiniband")
    shm: Path = Path("/dev/shm")
    kernel_log: Path = Path("/dev/kmsg")
    driver: Path = Path("/proc/driver/nvidia/params")
    now: Callable[[], float] = field(default=time.time)
    uptime: Callable[[], float] = field(default=lambda: time.clock_gettime(time.CLOCK_BOOTTIME))


def examine_node(
    required: NodeRequirements, gpus: Callable[[], list[NvmlGpu]] | None = None, places: Places | None = None
) -> tuple[list[str], list[str]]:
    """Examines this node. Returns two lists of sentences: faults that make the node unfit, and notes. `gpus`: function
    that returns the GPUs to examine; None: all GPUs of the node."""
    if places is None:
        places = Places()
    problems = [*_clock(required, places), *_space(required, places), *_hcas(required, places)]
    notes: list[str] = []
    if required.gpus:
        try:
            present = (gpus or all_gpus)()
        except SlimxError as error:
            return [*problems, str(error)], notes
        if len(present) < required.gpus:
            problems.append(
                f"only {len(present)} of {required.gpus} required GPUs respond; run dmesg to find the cause"
            )
        for gpu in present:
            try:
                notes += check_health(gpu)
            except SlimxError as error:
                problems.append(str(error))
        problems += _kernel_errors(places)
        notes += _ibgda(places)
    return problems, notes


def all_gpus() -> list[NvmlGpu]:
    """Returns every GPU that NVML reports. Raises SlimxError if NVML is not available."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError as error:
        raise SlimxError(
            f"NVML does not respond ({error}); install or reload the NVIDIA driver",
        ) from error
    gpus = []
    for uuid in uuids:
        if isinstance(uuid, bytes):
            uuid = uuid.decode()
        gpus.append(NvmlGpu(uuid))
    return gpus


def _clock(required: NodeRequirements, places: Places) -> Iterator[str]:
    if required.clock is None:
        return
    off = abs(places.now() - required.clock)
    if off > required.skew_s:
        yield (
            f"the clock is {off:.0f} s from the launcher's, more than {required.skew_s:.0f}, or the check started "
            "that late; check chrony or ntp"
        )


def _space(required: NodeRequirements, places: Places) -> Iterator[str]:
    needs = [(path, required.disk_gib) for path in required.paths]
    needs.append((places.shm, required.shm_gib))
    for path, need in needs:
        try:
            free = shutil.disk_usage(path).free / GIB
        except OSError as error:
            yield f"{path.absolute()} cannot be examined ({error.strerror}); check that its file system is mounted"
            continue
        if free < need:
            yield (
                f"{path.absolute()} has {free:.1f} GiB free, but the run needs {need:g}; remove files that are not "
                "needed"
            )
        elif not os.access(path, os.W_OK):
            yield f"{path.absolute()} cannot be written; check whether it is mounted read-only"


def _hcas(required: NodeRequirements, places: Places) -> Iterator[str]:
    for name in required.hcas:
        ports = sorted((places.infiniband / name / "ports").glob("*/state"))
        if not ports:
            yield f"{places.infiniband / name} does not exist; check that the adapter's driver is loaded"
        elif not any("ACTIVE" in state.read_text() for state in ports):
            states = ", ".join(state.read_text().strip() for state in ports)
            yield f"no port of {name} is active ({states}); check ibstat, the cable and the switch"


def _ibgda(places: Places) -> Iterator[str]:
    """Yields a note if the driver lacks options for DeepEP on a node with InfiniBand or RoCE adapters. This is not a
    fault, because DeepEP needs them only between nodes and not every run uses DeepEP."""
    if not places.driver.exists() or not (places.infiniband.is_dir() and os.listdir(places.infiniband)):
        return
    params = places.driver.read_text()
    missing = []
    for option, line in IBGDA.items():
        if not re.search(line, params, re.MULTILINE):
            missing.append(option)
    if missing:
        yield (
            f"the NVIDIA driver runs without {' and '.join(missing)}, which DeepEP needs between nodes "
            "(trainer.moe.dispatcher=flex, moe_a2a_backend=deepep); add to /etc/modprobe.d: options nvidia "
            'NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"'
        )


def _kernel_errors(places: Places) -> Iterator[str]:
    """Yields a sentence for each recent XID that requires a reset or replacement of a GPU; nothing if the kernel log
    cannot be read."""
    oldest = places.uptime() - RECENT_S
    for line in _lines(places.kernel_log):
        # format: priority,sequence,microseconds since boot,flags;text
        head, _, text = line.partition(";")
        match = XID_LINE.search(text)
        if match is None or int(match[2]) not in XIDS:
            continue
        logged = int(head.split(",")[2]) / 1e6
        if logged >= oldest:
            ago = (places.uptime() - logged) / 60
            yield f"{match[1]}: the kernel logged XID {match[2]} {ago:.0f} minutes ago; reset the GPU, or replace it"


def _lines(kernel_log: Path) -> Iterator[str]:
    """Yields the records of `kernel_log` (/dev/kmsg or a file like it) without waiting for new records. Each read of
    /dev/kmsg returns one record."""
    try:
        file = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(file, 1 << 16)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the record has been overwritten; the next read returns a newer one
                    continue
                return
            if not record:
                return
            yield from record.decode(errors="replace").splitlines()
    finally:
        os.close(file)
