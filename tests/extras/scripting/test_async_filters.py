"""Filters of groups may be async, and have a deadline."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slimx.data.records import Group
from slimx.errors import DeadlineError
from slimx.rollout.flow.returned import verdict_of
from tests.extras.rewards.reward_stand import trajectory
from tests.unit.rollout.rollout_stand import prompts


async def test_a_filter_may_be_async():
    group = Group(id="g", prompt=prompts()[0], trajectories=[trajectory()])

    async def keep(group: Group) -> str:
        await asyncio.sleep(0)
        return "too short"

    assert await verdict_of(keep, group, group.trajectories, "keep", 9) == "too short"
    assert await verdict_of(lambda group: np.bool_(True), group, group.trajectories, "keep", 9)


async def test_an_async_filter_has_a_deadline():
    group = Group(id="g", prompt=prompts()[0], trajectories=[trajectory()])

    async def keep(group: Group) -> bool:
        await asyncio.sleep(60)
        return True

    async def impatient(group: Group) -> bool:
        raise TimeoutError("of its own")

    with pytest.raises(DeadlineError) as raised:
        await verdict_of(keep, group, group.trajectories, "keep", 0.05)
    assert raised.value.holder == "keep"
    with pytest.raises(TimeoutError):
        await verdict_of(impatient, group, group.trajectories, "keep", 9)
