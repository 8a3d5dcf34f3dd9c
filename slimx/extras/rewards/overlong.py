"""Penalty for responses near the length limit: DAPO's soft overlong punishment (2503.14476, eq. 13)."""

from __future__ import annotations

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.rewards.context import Context


async def reward(ctx: Context, trajectory: Trajectory, *, limit: int, buffer: int) -> float:
    """Returns 0.0 for up to `limit - buffer` sampled tokens, then a value that decreases linearly to -1.0 at `limit`
    tokens, and -1.0 for more.

    Raises SlimxError unless 0 < buffer <= limit."""
    if not 0 < buffer <= limit:
        raise SlimxError(
            f"slimx.extras.rewards.overlong: reward.options.buffer={buffer} (tokens) must be above 0 and at most "
            f"reward.options.limit={limit}; set reward.options.buffer to a value from 1 to {limit}",
            code="reward.option",
            about="buffer",
        )
    beyond = len(trajectory.sampled_ids()) - (limit - buffer)
    return -min(max(beyond / buffer, 0.0), 1.0)
