"""Watches ranks, so that a rank that dies or stops responding is reported soon, and no other rank is blamed.

During a call, all ranks wait for the missing one, so an error about the call's deadline names all ranks. Between calls,
each rank is pinged separately. A stopped process (SIGSTOP) on this machine is detected by its state, even during a
call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import psutil

from slimx.cluster.waiting import explain
from slimx.errors import PartLost, SlimxError
from slimx.orchestration.ranks.group import RankGroup
from slimx.runtime.ports import machine
from slimx.runtime.tasks import first_of

LOOK_S = 0.5
"""Interval between two checks of a rank that has not responded, in seconds."""
PING_S = 1.0
"""Minimum interval between two pings of a rank, in seconds; large groups use a longer interval, so that at most 100
ranks are pinged per second."""


async def watch_ranks(group: RankGroup, deadline_s: float) -> SlimxError:
    """Watches the started ranks of `group`. As soon as a rank is lost, returns the error that names it. `deadline_s`:
    seconds after which a rank that is stopped, or that does not respond between calls, counts as lost."""
    watches = [_answers(group, rank, deadline_s) for rank in range(group.sizes.world)]
    for rank, pid in local_pids(group).items():
        watches.append(_runs(group, rank, pid, deadline_s))
    return await first_of(watches)


def local_pids(group: RankGroup) -> dict[int, int]:
    """Returns the process id of each rank that runs on this machine, by rank."""
    this_machine = machine()
    pids = {}
    for rank, process in enumerate(group.started):
        if process["machine"] == this_machine:
            pids[rank] = process["pid"]
    return pids


async def _answers(group: RankGroup, rank: int, deadline_s: float) -> SlimxError:
    time = asyncio.get_running_loop().time
    while True:
        answer = asyncio.ensure_future(_result(group.actors[rank].ping.remote()))
        silent_since = time()
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                if group.calling is not None:
                    silent_since = time()
                elif time() - silent_since > deadline_s:
                    return _lost(group, rank, f"has not responded for {deadline_s:g} s although no call keeps it busy")
            answer.result()
        except Exception as error:
            what = group.calling or "a pause between two calls"
            return explain(error, what, group.holder(rank), group.logs[rank])
        finally:
            answer.cancel()
        await asyncio.sleep(max(PING_S, group.sizes.world / 100))


async def _runs(group: RankGroup, rank: int, pid: int, deadline_s: float) -> SlimxError:
    time = asyncio.get_running_loop().time
    ran = time()
    while True:
        await asyncio.sleep(PING_S)
        try:
            stopped = psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return await asyncio.Future()  # `_answers` reports that it ended
        if not stopped:
            ran = time()
        elif time() - ran > deadline_s:
            return _lost(group, rank, f"(process {pid}) has been stopped for {deadline_s:g} s, probably by SIGSTOP")


async def _result(reference: Awaitable[object]) -> object:
    return await reference


def _lost(group: RankGroup, rank: int, reason: str) -> PartLost:
    name = group.holder(rank)
    return PartLost(
        f"{name} {reason}; see the log {group.logs[rank]}, and run the same command again to continue from the "
        "newest checkpoint",
        code="rank.silent",
        about=name,
    )
