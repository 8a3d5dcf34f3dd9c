"""`slimx health`: is this node fit for a run? It is what a launcher asks of every node before it starts anything there.

It looks at what breaks runs hours later (memory errors, a GPU that fell off the bus, a full disk, a clock that is off)
and imports neither torch nor Ray: a check of hundreds of nodes shall take seconds.
"""

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
"""Errors after which NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) has the GPU reset or replaced: memory (48,
64, 95, 140), NVLink (74), off the bus (79), its own processors (62, 119, 120, 143). Others come of programs, or
are in NVML's counters."""
IBGDA = {"NVreg_EnableStreamMemOPs=1": r"^EnableStreamMemOPs: 1$", "PeerMappingOverride=1": r"PeerMappingOverride=1"}
"""Options of NVIDIA's kernel module with which GPUs ring InfiniBand adapters themselves, as DeepEP has them do between
nodes (docs.nvidia.com/nvshmem, installation guide), and what the driver shows of each."""
XID_LINE = re.compile(r"NVRM: Xid \((PCI:[^)]+)\): (\d+)")
RECENT_S = 3600.0
"""Age in seconds up to which an error in the kernel's log counts: a node that was repaired keeps its log."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Needs of a run of each of its nodes."""

    gpus: int = 0
    """Number that must be there."""
    disk_gib: float = 5.0
    """Free on the disk of each of `paths`."""
    shm_gib: float = 1.0
    """Free in /dev/shm: Ray's object store and NCCL."""
    paths: Sequence[Path] = (Path("/tmp"), Path())
    hcas: Sequence[str] = ()
    """InfiniBand or RoCE adapters with an active port."""
    clock: float | None = None
    """Seconds since the epoch on the launcher's clock, when it asked."""
    skew_s: float = 60.0
    """Seconds that this node's clock may be from that; a slow start of the check counts too."""


@dataclass(frozen=True, slots=True)
class Places:
    """Places of the facts; tests give others."""

    infiniband: Path = Path("/sys/class/infiniband")
    shm: Path = Path("/dev/shm")
    kernel_log: Path = Path("/dev/kmsg")
    driver: Path = Path("/proc/driver/nvidia/params")
    now: Callable[[], float] = field(default=time.time)
    uptime: Callable[[], float] = field(default=lambda: time.clock_gettime(time.CLOCK_BOOTTIME))


def examine_node(
    wanted: Wanted, gpus: Callable[[], list[NvmlGpu]] | None = None, places: Places | None = None
) -> tuple[list[str], list[str]]:
    """Examine the node: what makes it unfit, and what is only worth knowing; each one sentence."""
    places, problems, notes = places or Places(), [], []
    for look in (_clock(wanted, places), _space(wanted, places), _hcas(wanted, places)):
        problems += look
    if wanted.gpus:
        try:
            found = (gpus or all_gpus)()
        except SlimxError as error:
            return [*problems, str(error)], notes
        if len(found) < wanted.gpus:
            problems.append(f"{len(found)} GPUs answer, the run wants {wanted.gpus}; look at dmesg and the driver")
        for gpu in found:
            try:
                notes += check_health(gpu)
            except SlimxError as error:
                problems.append(str(error))
        problems += _kernel_errors(places)
        notes += _ibgda(places)
    return problems, notes


def all_gpus() -> list[NvmlGpu]:
    """Every GPU that NVML shows. Raises SlimxError if there is no NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError as error:
        raise SlimxError(
            f"NVML does not answer ({error}); look at the NVIDIA driver",
        ) from error
    return [NvmlGpu(uuid.decode() if isinstance(uuid, bytes) else uuid) for uuid in uuids]


def _clock(wanted: Wanted, places: Places) -> Iterator[str]:
    if wanted.clock is not None and (off := abs(places.now() - wanted.clock)) > wanted.skew_s:
        yield (
            f"the clock is {off:.0f} s from the launcher's, more than {wanted.skew_s:.0f}, or the check was as "
            "late; look at chrony or ntp"
        )


def _space(wanted: Wanted, places: Places) -> Iterator[str]:
    for path, need in [*((path, wanted.disk_gib) for path in wanted.paths), (places.shm, wanted.shm_gib)]:
        try:
            free = shutil.disk_usage(path).free / GIB
        except OSError as error:
            yield f"{path.absolute()} cannot be looked at ({error.strerror}); is its file system mounted?"
            continue
        if free < need:
            yield f"{path.absolute()} has {free:.1f} GiB free, the run wants {need:g}; remove what others left there"
        elif not os.access(path, os.W_OK):
            yield f"{path.absolute()} cannot be written; is it mounted read-only?"


def _hcas(wanted: Wanted, places: Places) -> Iterator[str]:
    for name in wanted.hcas:
        ports = sorted((places.infiniband / name / "ports").glob("*/state"))
        if not ports:
            yield f"{places.infiniband / name} is not there; is the adapter's driver loaded?"
        elif not any("ACTIVE" in state.read_text() for state in ports):
            states = ", ".join(state.read_text().strip() for state in ports)
            yield f"no port of {name} is active ({states}); look at ibstat, cable and switch"


def _ibgda(places: Places) -> Iterator[str]:
    """Options of the driver, on a node with adapters, that DeepEP needs between nodes: not every run has it."""
    if not places.driver.exists() or not (places.infiniband.is_dir() and os.listdir(places.infiniband)):
        return
    params = places.driver.read_text()
    if missing := [option for option, line in IBGDA.items() if not re.search(line, params, re.MULTILINE)]:
        yield (
            f"the NVIDIA driver runs without {' and '.join(missing)}, which DeepEP needs between nodes "
            "(trainer.moe.dispatcher=flex, moe_a2a_backend=deepep); add to /etc/modprobe.d: options nvidia "
            'NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"'
        )


def _kernel_errors(places: Places) -> Iterator[str]:
    """Recent XIDs that want the GPU reset or replaced; none where the kernel's log may not be read."""
    oldest = places.uptime() - RECENT_S
    for line in _lines(places.kernel_log):
        # priority,sequence,microseconds since boot,flags;text
        head, _, text = line.partition(";")
        if (match := XID_LINE.search(text)) is None or int(match[2]) not in XIDS:
            continue
        if (at := int(head.split(",")[2]) / 1e6) >= oldest:
            ago = (places.uptime() - at) / 60
            yield f"{match[1]}: the kernel logged XID {match[2]} {ago:.0f} minutes ago; reset the GPU, or replace it"


def _lines(kernel_log: Path) -> Iterator[str]:
    """The records of /dev/kmsg: one per read, without waiting for more."""
    try:
        file = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(file, 1 << 16)
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten meanwhile; the next one is there
                    continue
                return
            if not record:
                return
            yield from record.decode(errors="replace").splitlines()
    finally:
        os.close(file)
