"""The processes of the soak's run by kind, and what each of them holds: memory, files, threads, sockets."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from slimx.runtime.process import PR_SET_CHILD_SUBREAPER, shared_memory_inodes

MIB = 2**20
GUARD = "slimx.runtime.process"
KINDS = {
    "engine: scheduler": "sglang::scheduler",
    "engine: detokenizer": "sglang::detokenizer",
    "engine: HTTP server": r"slimx\.engines\.server\.launch",
    "engine: actor": "ray::Engine",
    "router": r"sglang::router|slimx\.engines\.server\.router_launch",
    "trainer": "ray::TrainerWorker",
    "reward worker": r"multiprocessing\.spawn",
    "driver": r"slimx\.cli train",
    "Ray: raylet": r"^raylet ",
    "Ray: GCS": r"^gcs_server ",
    "Ray: agents": r"ray/dashboard|runtime_env/agent|log_monitor|autoscaler|ray::",
}
"""Expressions that are searched for in the name and command line of a process, the first that fits."""
GUARDS = {"engine: guard": r"slimx\.engines\.server\.launch", "router: guard": r"slimx\.engines\.server\.router_launch"}
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at one moment."""

    step: int
    kind: str
    pid: int
    born: float
    """Unix seconds of its start."""
    anonymous: float
    """MiB of memory that no file stands behind, whether other processes have the same pages or not: private memory
    jumps where a process ends that was forked from the same one."""
    pss: float
    """MiB with its part of what it shares."""
    fds: int
    threads: int
    sockets: int
    """TCP and UDP sockets."""
    ports: int
    """TCP ports on which it listens."""
    shm: float
    """MiB of /dev/shm that it has mapped."""

    def row(self) -> dict:
        return asdict(self)


MEASURED = tuple(field.name for field in fields(Sample))[4:]


def adopt_orphans() -> None:
    """Have this process become the parent of what loses its own, so that nothing of a run escapes the census."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kind_of(name: str, command: str) -> str:
    """The kind of a process by its name and command line."""
    text = f"{name} {command}"
    if GUARD in text:
        return next((kind for kind, pattern in GUARDS.items() if re.search(pattern, text)), OTHER)
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), OTHER)


def living(but: int | None = None) -> list[tuple[str, psutil.Process]]:
    """All descendants of this process that have not ended, with their kinds. Orphans that ended are collected; `but`
    is left to whoever started it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append((kind_of(process.name(), " ".join(process.cmdline())), process))
            elif process.ppid() == os.getpid() and process.pid != but:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
    return found


def samples(step: int) -> Iterator[Sample]:
    """The present holdings of every process of the run."""
    for kind, process in living():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            memory = _memory(process.pid)
            sockets = process.net_connections("inet")
            yield Sample(
                step=step,
                kind=kind,
                pid=process.pid,
                born=process.create_time(),
                anonymous=memory["Anonymous"] / 1024,
                pss=memory["Pss"] / 1024,
                fds=process.num_fds(),
                threads=process.num_threads(),
                sockets=len(sockets),
                ports=sum(each.status == psutil.CONN_LISTEN for each in sockets),
                shm=_shared(process.pid) / MIB,
            )


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Names in /dev/shm that were not there `before` and that no living process has mapped."""
    used = shared_memory_inodes(1)
    new = {name: Path("/dev/shm", name) for name in os.listdir("/dev/shm") if name not in before}
    return sorted(name for name, path in new.items() if path.exists() and path.stat().st_ino not in used)


def _memory(pid: int) -> dict[str, int]:
    """KiB by kind, summed over the address space of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}


def _shared(pid: int) -> int:
    """Bytes of /dev/shm and of memory files in the address space of a process."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if " /dev/shm/" in line or " /memfd:" in line:
            begin, _, end = line.split(maxsplit=1)[0].partition("-")
            total += int(end, 16) - int(begin, 16)
    return total
