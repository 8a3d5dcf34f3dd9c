"""Jobs that a worker has not finished, and their end if the worker is lost too often."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slimx.errors import PartLost, SlimxError
from slimx.extras.rollout_workers.messages import Job
from slimx.rollout.flow.progress import GroupProgress
from slimx.rollout.flow.rollouts import GroupOutcome

MAX_LOSSES = 3
"""Number of times that a group may lose its worker, and that a worker may be lost in a row without finishing a group.
Only the last of these losses decides: groups that have lost their worker once less are generated one at a time, so that
the one that is the cause is known."""
LOST = "worker lost"
"""Drop reason for a group that lost its worker too often, because it is likely to be the cause."""


class Lost(PartLost):
    """Error for a job whose worker cannot be replaced."""

    def __init__(self, reason: SlimxError):
        super().__init__(str(reason), code=reason.code, about=reason.about)


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job that is not finished."""

    job: Job
    progress: GroupProgress
    outcome: asyncio.Future[GroupOutcome]
    losses: int = 0
    """Number of times that its worker was lost while it worked on the job, or, if the cause is known, because of the
    job."""
    sent: bool = False
    """True if the worker has the job."""

    @property
    def suspected(self) -> bool:
        """True if the group would be dropped at the next loss of its worker."""
        return self.losses == MAX_LOSSES - 1
