"""Watches Ray's processes: without them trainers and engines are unreachable, which Ray itself reports late.

every second    local cluster: are gcs_server and raylet, children of this process, still running?
in between      does the raylet store an object, does the GCS list the nodes, within `cluster.ray_deadline`?
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import psutil
import ray

from slimx.cluster.waiting import ask_ray
from slimx.errors import DeadlineError, PartLost
from slimx.runtime.tasks import first_of

LOOK_S = 1.0
"""Seconds between two checks of the processes."""
NAMES = {"gcs_server": "GCS", "raylet": "raylet"}
"""Ray's process names -> names in messages."""

Probe = Callable[[], object]


def local_processes() -> dict[str, psutil.Process]:
    """Returns the processes of a cluster that this process has started, by name; {} for a joined cluster."""
    processes: dict[str, psutil.Process] = {}
    for child in psutil.Process().children():
        name = child.name()
        if name in NAMES:
            processes[NAMES[name]] = child
    return processes


def probes() -> dict[str, Probe]:
    """Returns, by name of a part of Ray, a call that the part must answer."""
    return {"raylet": lambda: ray.put(b""), "GCS": ray.nodes}


async def watch_ray(
    processes: Mapping[str, psutil.Process], probes: Mapping[str, Probe], deadline_s: float, look_s: float = LOOK_S
) -> PartLost:
    """Watches the cluster; returns why it is unusable as soon as that is detected."""
    watches = [_ended(processes, look_s)]
    for name, probe in probes.items():
        watches.append(_silent(name, probe, deadline_s))
    return await first_of(watches)


async def _ended(processes: Mapping[str, psutil.Process], look_s: float) -> PartLost:
    while (lost := has_ended(processes)) is None:
        await asyncio.sleep(look_s)
    return lost


def has_ended(processes: Mapping[str, psutil.Process]) -> PartLost | None:
    """Returns an error for the first of Ray's processes that has ended."""
    for name, process in processes.items():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                continue
        except psutil.NoSuchProcess:
            pass
        return _lost(name, f"process {process.pid} has ended")
    return None


async def _silent(name: str, probe: Probe, deadline_s: float) -> PartLost:
    while True:
        try:
            await ask_ray("an answer", f"Ray's {name}", deadline_s, probe)
        except DeadlineError:
            return _lost(name, f"it has not answered for {deadline_s:g} s")
        except Exception as error:
            return _lost(name, " ".join(str(error).split())[:200])
        await asyncio.sleep(deadline_s / 4)


def _lost(name: str, reason: str) -> PartLost:
    return PartLost(
        f"Ray's {name} is lost ({reason}), and trainers and engines with it; the logs of Ray's session say why, and "
        "the same command goes on from the newest checkpoint",
        code="ray.lost",
        about=name,
    )
