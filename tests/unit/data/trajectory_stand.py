"""Trajectories with given numbers of trained tokens."""

from __future__ import annotations

import numpy as np

from slimx.data.records import Span, Trajectory


def trajectory(group: str, rollout: str, mask: list[int]) -> Trajectory:
    return Trajectory(
        id=f"{group}/{rollout}",
        rollout_id=rollout,
        group_id=group,
        index=0,
        token_ids=np.ones(len(mask), np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.full(len(mask), np.nan, np.float32),
        spans=[Span(start=0, stop=len(mask), source="inserted")],
    )
