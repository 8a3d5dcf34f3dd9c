"""CPU time by role, and what moves between the processes of benchmarks/rollout_scale.py.

CPU time is user and system time of the processes, so other work on the machine does not count as theirs. It has the
kernel's resolution of 10 ms for each process."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, fields

import psutil
import ray
from ray._private import internal_api

RECEIVED = 128
"""Offset of `tcpi_bytes_received` in Linux's struct tcp_info."""


@dataclass(slots=True, kw_only=True)
class Usage:
    """Totals since the start: CPU seconds by role, requests, and bytes and objects that moved."""

    driver: float = 0.0
    workers: float = 0.0
    ray: float = 0.0
    """CPU seconds of Ray's own processes: GCS, raylet and its agents, and workers that have no work."""
    engines: float = 0.0
    requests: float = 0.0
    received: float = 0.0
    """Bytes that the driver has received over TCP, from Ray and from engines."""
    objects: float = 0.0
    object_bytes: float = 0.0
    """Objects that Ray's store has created, and their bytes."""

    def since(self, before: Usage) -> Usage:
        """Returns what was added since `before`."""
        return Usage(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})


def _cpu(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return spent.user + spent.system


def role_of(process: psutil.Process, engines: Collection[int], workers: str) -> str:
    """Returns the role of a child of this process. `workers`: name of the class of Ray's actors that make rollouts;
    what they start has their role."""
    for one in (process, *process.parents()):
        if one.pid == os.getpid():
            break
        if one.pid in engines:
            return "engines"
        if " ".join(one.cmdline()).startswith(f"ray::{workers}"):
            return "workers"
    return "ray"


def measure(engines: Collection[int], requests: int, workers: str) -> Usage:
    """Returns the totals of this process, the driver, and all that it has started."""
    me = psutil.Process()
    usage = Usage(driver=_cpu(me), requests=requests, received=received())
    for process in me.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            role = role_of(process, engines, workers)
            setattr(usage, role, getattr(usage, role) + _cpu(process))
    usage.objects, usage.object_bytes = created()
    return usage


def created() -> tuple[float, float]:
    """Returns the number of objects that Ray's store on this machine has created, and their bytes. Smaller results
    (below 100 kB) travel inside messages, and are part of what the driver receives."""
    node = ray.nodes()[0]
    reply = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    stats = reply.store_stats
    return float(stats.cumulative_created_objects), float(stats.cumulative_created_bytes)


def received() -> float:
    """Returns the bytes that this process has received over its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, RECEIVED)[0]
    return float(total)


def memory_of(workers: str) -> tuple[float, list[float]]:
    """Returns the resident memory of this process and of each worker, in MB."""
    me = psutil.Process()
    found = []
    for process in me.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if role_of(process, (), workers) == "workers":
                found.append(process.memory_info().rss / 1e6)
    return me.memory_info().rss / 1e6, found
