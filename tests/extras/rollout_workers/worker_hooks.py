"""Hooks that rollout workers import: a rollout of two turns, and what befalls its process in between."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext

KEPT: list[bytearray] = []


async def two_turns(
    ctx: RolloutContext, prompt: Prompt, marks: str = "", strike: str = "", pause: float = 0.0
) -> Trajectory:
    """Samples two turns with a pause between them, in which the first rollout of the group g1 does `strike`, only once
    if the name ends with "_once". The process id is appended to the file `struck` in the directory `marks`."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=0))
    await asyncio.sleep(pause)
    if strike and ctx.group_id == "g1" and ctx.index == 0:
        mark = Path(marks, "struck")
        if not mark.exists() or not strike.endswith("_once"):
            with mark.open("a") as file:
                file.write(f"{os.getpid()}\n")
            STRIKES[strike.removesuffix("_once")]()
            await asyncio.sleep(30)  # a worker that grows is not lost at once
    draft.add_inserted([3, 3])
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1))
    ctx.log("pid", os.getpid())
    return draft.finish()


STRIKES = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(600),
    "match": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),  # holds the GIL for years
    "grow": lambda: KEPT.append(bytearray(os.urandom(1)) * (3 << 30)),
}


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns a reward that depends on the tokens alone."""
    return float(trajectory.token_ids.sum() % 5)


def keep(group: Group) -> bool | str:
    """Drops a fifth of the groups, the same ones whatever the timing."""
    return "unlucky" if group.trajectories[0].sampling["seed"] % 5 == 0 else True
