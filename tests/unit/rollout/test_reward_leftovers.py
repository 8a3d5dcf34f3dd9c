"""A reward hook that leaves something behind in its thread's event loop does not disturb the next call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from slimx.rollout.flow.reward_pool import RewardPool


async def test_a_watchdog_that_a_call_left_behind_cancels_no_later_call():
    async def reward(ctx: Any, trajectory: Any) -> float:
        if trajectory.id == "first":
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.02, task.cancel)
            return 1.0
        await asyncio.sleep(0.2)
        return 2.0

    pool = RewardPool(reward, workers=1, deadline_s=300)
    try:
        async with asyncio.timeout(60):
            assert await pool.judge(None, SimpleNamespace(id="first")) == (1.0, {})
            assert await pool.judge(None, SimpleNamespace(id="second")) == (2.0, {})
    finally:
        pool.close()
