"""Counts the resources of the soak's processes by kind: memory, files, threads, sockets."""

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
"""Kind -> regular expression that is searched for in a process's name and command line. The first match decides."""
GUARDS = {"engine: guard": r"slimx\.engines\.server\.launch", "router: guard": r"slimx\.engines\.server\.router_launch"}
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of one process at one moment."""

    step: int
    kind: str
    pid: int
    born: float
    """Start time of the process, in Unix seconds."""
    anonymous: float
    """Anonymous memory in MiB, shared pages included. Private memory would jump when a process ends that was forked
    from the same one."""
    pss: float
    """Proportional set size, in MiB."""
    fds: int
    threads: int
    sockets: int
    """Number of TCP and UDP sockets."""
    ports: int
    """Number of TCP ports on which the process listens."""
    shm: float
    """Mapped shared memory in /dev/shm, in MiB."""

    def row(self) -> dict:
        return asdict(self)


MEASURED = tuple(field.name for field in fields(Sample))[4:]


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, so that the census misses no process of a run."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kind_of(name: str, command: str) -> str:
    """Returns the kind of a process by its name and command line."""
    text = f"{name} {command}"
    if GUARD in text:
        return next((kind for kind, pattern in GUARDS.items() if re.search(pattern, text)), OTHER)
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), OTHER)


def living(but: int | None = None) -> list[tuple[str, psutil.Process]]:
    """Returns all living descendants of this process with their kinds. Reaps ended orphans except `but`, which its
    starter reaps."""
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
    """Yields a sample of every process of the run."""
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
                ports=sum(socket.status == psutil.CONN_LISTEN for socket in sockets),
                shm=_shared(process.pid) / MIB,
            )


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Returns the names in /dev/shm that were not there `before` and that no living process has mapped."""
    used = shared_memory_inodes(1)
    new = {name: Path("/dev/shm", name) for name in os.listdir("/dev/shm") if name not in before}
    return sorted(name for name, path in new.items() if path.exists() and path.stat().st_ino not in used)


def _memory(pid: int) -> dict[str, int]:
    """Returns the memory of a process by kind, summed over its address space, in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}


def _shared(pid: int) -> int:
    """Returns the bytes of /dev/shm and of memory files that a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if " /dev/shm/" in line or " /memfd:" in line:
            begin, _, end = line.split(maxsplit=1)[0].partition("-")
            total += int(end, 16) - int(begin, 16)
    return total
