"""The end of processes that may be stopped: an actor is asked to end itself, which one under SIGSTOP does not do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.errors import PartLost
from slimx.runtime.tasks import in_thread

END_S = 20.0
"""Seconds in which a killed process must have ended: longer, and a driver or a file system holds it."""
_LOOK_S = 0.05


def end(pids: Sequence[int]) -> list[int]:
    """Kill workers of Ray by process id, on the machine where this runs; those that are still there after `END_S`. An
    id that belongs to no worker any more is left alone."""
    left = [pid for pid in pids if _worker(pid)]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    until = time.monotonic() + END_S
    while left and time.monotonic() < until:
        time.sleep(_LOOK_S)
        left = [pid for pid in left if _worker(pid)]
    return left


async def fence(pids: Mapping[str | None, Sequence[int]], what: str) -> None:
    """Kill processes by Ray's id of their machine, None: this one. Returns when none of them runs; a machine that Ray
    has lost runs none that could be reached. Raises PartLost naming `what` if one does not end."""
    work = [in_thread(end, own) if node is None else _there(node, own) for node, own in pids.items() if own]
    left = [pid for several in await asyncio.gather(*work) for pid in several]
    if left:
        raise PartLost(
            f"{what}: the processes {', '.join(map(str, left))} did not end within {END_S:.0f} s of SIGKILL, so that "
            "nothing can take their place; a driver or a file system holds them",
            code="rank.held",
            about=what,
        )


async def _there(node: str, pids: Sequence[int]) -> list[int]:
    task = ray.remote(end).options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
    try:
        async with asyncio.timeout(2 * END_S):
            return await task.remote(list(pids))
    except (ray.exceptions.RayError, TimeoutError):
        return []  # a machine that takes no task has no worker that answers either


def _worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "ray::" in " ".join(process.cmdline() or [process.name()])
    except psutil.Error:
        return False
