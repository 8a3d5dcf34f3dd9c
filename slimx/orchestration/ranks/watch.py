"""Watches ranks that train while they wait: one that dies or stands still is named alone, and soon.

Inside a call all ranks wait for the one that is missing, so that its deadline names them all; outside of one each of
them answers by itself. On this machine a stopped process shows in its state, whatever it is in.
"""

from __future__ import annotations

import asyncio

import psutil

from slimx.cluster.waiting import explain
from slimx.errors import PartLost
from slimx.orchestration.ranks.group import RankGroup
from slimx.runtime.ports import machine
from slimx.runtime.tasks import first_of

LOOK_S = 0.5
"""Seconds between two looks at a rank that has not answered."""
PING_S = 1.0
"""Seconds between two questions to a rank; a large group is asked less often, 100 ranks a second."""


async def watch_ranks(group: RankGroup, deadline_s: float) -> PartLost:
    """Watch the started ranks of `group`; returns why one of them is lost, as soon as that is known.

    `deadline_s`: seconds that a rank may be silent outside of calls, or stopped."""
    return await first_of(
        [
            *(_answers(group, rank, deadline_s) for rank in range(group.sizes.world)),
            *(_runs(group, rank, pid, deadline_s) for rank, pid in local_pids(group).items()),
        ]
    )


def local_pids(group: RankGroup) -> dict[int, int]:
    """Process ids by rank of those on this machine."""
    here = machine()
    return {rank: one["pid"] for rank, one in enumerate(group.started) if one["machine"] == here}


async def _answers(group: RankGroup, rank: int, deadline_s: float) -> PartLost:
    time = asyncio.get_running_loop().time
    while True:
        answer = asyncio.ensure_future(_result(group.actors[rank].ping.remote()))
        silent_since = time()
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                if group.calling is not None:
                    silent_since = time()
                elif time() - silent_since > deadline_s:
                    return _lost(group, rank, f"has not answered for {deadline_s:g} s, and no call keeps it busy")
            answer.result()
        except Exception as error:
            what = group.calling or "a pause between two calls"
            return explain(error, what, group.holder(rank), group.logs[rank])
        finally:
            answer.cancel()
        await asyncio.sleep(max(PING_S, group.sizes.world / 100))


async def _runs(group: RankGroup, rank: int, pid: int, deadline_s: float) -> PartLost:
    time = asyncio.get_running_loop().time
    ran = time()
    while True:
        await asyncio.sleep(PING_S)
        try:
            stopped = psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return await asyncio.Future()  # its next answer tells
        if not stopped:
            ran = time()
        elif time() - ran > deadline_s:
            return _lost(group, rank, f"(process {pid}) has been stopped for {deadline_s:g} s, as by SIGSTOP")


async def _result(reference: object) -> object:
    return await reference


def _lost(group: RankGroup, rank: int, how: str) -> PartLost:
    name = group.holder(rank)
    return PartLost(
        f"{name} {how}; its log is {group.logs[rank]}, and the same command goes on from the newest checkpoint",
        code="rank.silent",
        about=name,
    )
