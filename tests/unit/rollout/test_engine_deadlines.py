"""The end of a run whose engines did not answer in time is one after which the same command may go on."""

from __future__ import annotations

import pytest

from slimx.data.records import Prompt, Trajectory
from slimx.errors import LOST, REFUSED, DeadlineError, PartLost, SlimxError
from slimx.rollout.client.sending import REQUEST
from slimx.rollout.hooks import RolloutContext
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import Stand, config_of


@pytest.mark.parametrize("also", [None, ValueError("no tool")])
async def test_a_step_that_fails_by_engine_deadlines_alone_may_restart(also: Exception | None):
    async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        raise also if also and ctx.group_id == "g0" else DeadlineError(REQUEST, 600, "http://router")

    async with Stand(config_of(max_failed_share=0.25), generate=generate) as stand:
        with refused(
            "rollout.failed", about="rollout.max_failed_share", kind=SlimxError if also else PartLost
        ) as caught:
            await stand.next_batch()
    assert caught.value.status == (REFUSED if also else LOST)
