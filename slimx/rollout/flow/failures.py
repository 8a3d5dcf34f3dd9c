"""Failures of rollouts: how they are detected, named and recorded in a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from slimx.data.records import Prompt, Trajectory
from slimx.errors import DeadlineError, SlimxError, raised
from slimx.rollout.client.sending import REQUEST
from slimx.rollout.hooks import ENGINE_DEADLINE, RolloutContext, logged_twice
from slimx.runtime.clocks import Clock

Score = Callable[[Prompt, Trajectory], Awaitable[None]]
"""Adds values of another model, such as a teacher, to a trajectory of a prompt. Raises SlimxError."""


async def scored(score: Score, prompt: Prompt, trajectory: Trajectory) -> None:
    """Scores `trajectory`; marks it as failed if that fails."""
    with marking(trajectory, "teacher"):
        await score(prompt, trajectory)


def any_failed(trajectories: Sequence[Trajectory]) -> bool:
    return any(trajectory.status == "failed" for trajectory in trajectories)


@contextmanager
def marking(trajectory: Trajectory, stage: str) -> Iterator[None]:
    """Marks `trajectory` as failed in `stage` if the block raises SlimxError."""
    try:
        yield
    except SlimxError as error:
        cause = "deadline" if isinstance(error, DeadlineError) else "failed"
        _mark(trajectory, reason_of(error, f"{stage} {cause}"), str(error))


def reason_of(error: SlimxError, reason: str) -> str:
    """Returns `reason`, or ENGINE_DEADLINE if engines did not respond in time."""
    if isinstance(error, DeadlineError) and error.awaited == REQUEST:
        return ENGINE_DEADLINE
    return reason


def is_cancellation(error: BaseException) -> bool:
    """Returns True for a cancellation of the current task, rather than a hook's own CancelledError."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError | GeneratorExit) and (task is None or task.cancelling() > 0)


def add_metrics(trajectory: Trajectory, logged: Mapping[str, float]) -> None:
    """Adds a hook's logged numbers to its trajectory. Raises SlimxError for a name that another hook logged for it."""
    repeated = sorted(trajectory.metrics.keys() & logged.keys())
    if repeated:
        raise logged_twice(repeated[0])
    trajectory.metrics |= logged


def _mark(trajectory: Trajectory, reason: str, text: str) -> None:
    trajectory.status = "failed"
    trajectory.finish_reason = text
    trajectory.metadata["failed"] = reason


def crashed_trajectory(
    ctx: RolloutContext, error: BaseException, clock: Clock, hook: str, deadline_s: float
) -> Trajectory:
    """Returns the failed trajectory of a rollout whose generate hook raised `error`."""
    if isinstance(error, TimeoutError) and clock.expired:  # not a time-out inside the hook
        late = DeadlineError(f"rollout {ctx.group_id}/{ctx.index}", deadline_s, hook)
        return failed_trajectory(ctx, "generate deadline", str(late))
    return failed_trajectory(ctx, "generate failed", f"{hook} raised {raised(error)}")


def failed_trajectory(ctx: RolloutContext, reason: str, text: str) -> Trajectory:
    """Returns an empty trajectory that represents a failed rollout in its group."""
    trajectory = Trajectory(
        id=f"{ctx.group_id}/{ctx.index}",
        rollout_id=f"{ctx.group_id}/{ctx.index}",
        group_id=ctx.group_id,
        index=ctx.index,
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.uint8),
        logprobs=np.zeros(0, np.float32),
        spans=[],
    )
    _mark(trajectory, reason, text)
    return trajectory
