"""Detects the loss of Ray's processes, without which trainers and engines are unreachable; Ray itself reports it late.

In a local cluster it checks every second that gcs_server and raylet, children of this process, are still running. In
every cluster it checks periodically that the raylet stores an object and the GCS lists the nodes within
`cluster.ray_deadline`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import psutil
import ray

from slimx.cluster.waiting import ask_ray
from slimx.errors import DeadlineError, PartLost, one_line
from slimx.runtime.tasks import first_of

LOOK_S = 1.0
"""Seconds between checks that Ray's processes are still running."""
NAMES = {"gcs_server": "GCS", "raylet": "raylet"}
"""Process names of Ray's components, mapped to the components' names in error messages."""

Probe = Callable[[], object]


def local_processes() -> dict[str, psutil.Process]:
    """Returns the Ray processes that this process has started, by their names in messages; {} if it has joined an
    existing cluster."""
    processes: dict[str, psutil.Process] = {}
    for child in psutil.Process().children():
        name = child.name()
        if name in NAMES:
            processes[NAMES[name]] = child
    return processes


def probes() -> dict[str, Probe]:
    """Returns functions that each call one part of Ray and return when it has responded, by the name of that part."""
    return {"raylet": lambda: ray.put(b""), "GCS": ray.nodes}


async def watch_ray(
    processes: Mapping[str, psutil.Process], probes: Mapping[str, Probe], deadline_s: float, look_s: float = LOOK_S
) -> PartLost:
    """Waits until the loss of one of Ray's processes is detected, and returns an error that describes it.

    `processes`: processes that must be running, checked every `look_s` seconds. `probes`: functions that must return
    within `deadline_s` seconds, keyed by the name of the part of Ray that they call."""
    watches = [_ended(processes, look_s)]
    for name, probe in probes.items():
        watches.append(_silent(name, probe, deadline_s))
    return await first_of(watches)


async def _ended(processes: Mapping[str, psutil.Process], look_s: float) -> PartLost:
    while (lost := has_ended(processes)) is None:
        await asyncio.sleep(look_s)
    return lost


def has_ended(processes: Mapping[str, psutil.Process]) -> PartLost | None:
    """Returns an error for the first of `processes` that has ended; None if all are running."""
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
            await ask_ray("a response", f"Ray's {name}", deadline_s, probe)
        except DeadlineError:
            return _lost(name, f"no response within {deadline_s:g} s")
        except Exception as error:
            return _lost(name, one_line(error))
        await asyncio.sleep(deadline_s / 4)


def _lost(name: str, reason: str) -> PartLost:
    return PartLost(
        f"Ray's {name} was lost ({reason}), and with it all trainers and engines; see "
        "session_latest/logs of Ray's temporary directory, and repeat the command to resume from the newest checkpoint",
        code="ray.lost",
        about=name,
    )
