"""Kills worker processes, including those that are stopped by SIGSTOP. Ray only sends an actor a request to exit, to
which a stopped process does not respond."""

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
"""Seconds to wait for a killed process to exit. A process that takes longer is blocked in a device driver or a file
system."""
_LOOK_S = 0.05


def kill_workers(pids: Sequence[int]) -> list[int]:
    """Kills the Ray workers with these process ids on this machine, and returns the ids of those that are still running
    after `END_S`. Ids that no longer belong to a worker are ignored."""
    running = [pid for pid in pids if _is_worker(pid)]
    for pid in running:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    until = time.monotonic() + END_S
    while running and time.monotonic() < until:
        time.sleep(_LOOK_S)
        running = [pid for pid in running if _is_worker(pid)]
    return running


async def kill_on_nodes(pids: Mapping[str | None, Sequence[int]], about: str) -> None:
    """Kills processes on several nodes and waits until they have exited. `pids`: process ids by the Ray id of the node;
    None is the local node.

    Processes on a node that Ray has lost count as exited. Raises PartLost naming `about` if a process does not exit."""
    work = []
    for node, node_pids in pids.items():
        if node_pids:
            work.append(in_thread(kill_workers, node_pids) if node is None else _kill_on(node, node_pids))
    running = [pid for node_running in await asyncio.gather(*work) for pid in node_running]
    if running:
        raise PartLost(
            f"{about} cannot be replaced, because the processes {', '.join(map(str, running))} did not end within "
            f"{END_S:.0f} s after SIGKILL; search the kernel log (`dmesg`) for a device driver or file system that "
            "blocks these processes",
            code="rank.held",
            about=about,
        )


async def _kill_on(node: str, pids: Sequence[int]) -> list[int]:
    task = ray.remote(kill_workers).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    try:
        async with asyncio.timeout(2 * END_S):
            return await task.remote(list(pids))
    except (ray.exceptions.RayError, TimeoutError):
        return []  # a node that cannot run this task has no live workers either


def _is_worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "ray::" in " ".join(process.cmdline() or [process.name()])
    except psutil.Error:
        return False
