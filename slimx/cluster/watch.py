"""Watches Ray's own processes: without them trainers and engines cannot be reached, and Ray says it late, in its words.

each second    of a local cluster: do gcs_server and raylet, children of this process, still run?
in between     does the raylet store an object, does the GCS name the nodes, within `cluster.ray_deadline`?
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
"""Seconds between two looks at processes."""
NAMES = {"gcs_server": "GCS", "raylet": "raylet"}
"""Ray's processes by their names, and what they are called."""

Probe = Callable[[], object]


def own_processes() -> dict[str, psutil.Process]:
    """The processes of a cluster that this process has started, by what they are called; {} where it joined one."""
    return {NAMES[child.name()]: child for child in psutil.Process().children() if child.name() in NAMES}


def probes() -> dict[str, Probe]:
    """A call for each part of Ray, by the part's name, that it must answer."""
    return {"raylet": lambda: ray.put(b""), "GCS": ray.nodes}


async def watch_ray(
    processes: Mapping[str, psutil.Process], probes: Mapping[str, Probe], deadline_s: float, look_s: float = LOOK_S
) -> PartLost:
    """Watch the cluster; returns why it cannot be used any more, as soon as that is known."""
    watches = [_ended(processes, look_s), *(_silent(name, probe, deadline_s) for name, probe in probes.items())]
    return await first_of(watches)


async def _ended(processes: Mapping[str, psutil.Process], look_s: float) -> PartLost:
    while (lost := has_ended(processes)) is None:
        await asyncio.sleep(look_s)
    return lost


def has_ended(processes: Mapping[str, psutil.Process]) -> PartLost | None:
    """The first of Ray's processes that does not run any more."""
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


def _lost(name: str, how: str) -> PartLost:
    return PartLost(
        f"Ray's {name} is lost ({how}), and trainers and engines with it; the logs of Ray's session say why, and the "
        "same command goes on from the newest checkpoint",
        code="ray.lost",
        about=name,
    )
