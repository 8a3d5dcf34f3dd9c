"""Groups of trajectories with given rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimx.data.records import Group, Prompt, Span, Trajectory


def trajectory(group: str, rollout: int, reward: float, sampled: int = 3, **changes: Any) -> Trajectory:
    """Two prompt tokens and `sampled` sampled ones."""
    length = 2 + sampled
    fields: dict[str, Any] = {
        "id": f"{group}/{rollout}",
        "rollout_id": f"{group}/{rollout}",
        "group_id": group,
        "index": rollout,
        "token_ids": np.arange(length, dtype=np.int32),
        "loss_mask": np.array([0, 0] + [1] * sampled, np.uint8),
        "logprobs": np.array([np.nan] * 2 + [-0.5] * sampled, np.float32),
        "spans": [Span(start=0, stop=2, source="prompt"), Span(start=2, stop=length, source="sampled", version=0)],
        "reward": reward,
    }
    return Trajectory(**{**fields, **changes})


def group(name: str, rewards: list[float], **changes: Any) -> Group:
    members = [trajectory(name, index, reward) for index, reward in enumerate(rewards)]
    return Group(id=name, prompt=Prompt(id=name, token_ids=[1]), trajectories=members, **changes)
