"""Section schedule: steps, updates, and how far generation may run ahead."""

from __future__ import annotations

from slimx.config.section import Amount, Count, Seconds, Section
from slimx.config.sections.rollout import Rollout


class Schedule(Section):
    steps: Amount = 100
    """Steps of the run. Each trains on prompts_per_step x group_size rollouts and publishes weights once."""
    updates_per_step: Amount = 1
    """Optimizer updates per step, each on prompts_per_step / updates_per_step whole groups. In every update the loss's
    importance ratio is relative to the policy that sampled the tokens."""
    max_staleness: Count = 0
    """Number of weight versions that the oldest token of a trajectory may lag behind when it is trained. 0:
    synchronous; 1: one step off-policy; more: fully asynchronous."""
    window: Count = 0
    """Batches by which a finished group may overtake an older unfinished one, at most max_staleness; 0: groups are
    trained in the order of their prompts."""
    straggler_deadline: Seconds | None = None
    """Seconds that a batch waits for unfinished groups that may not be overtaken, once enough others have finished.
    Then they are dropped and counted as dropped/straggler. null: no limit."""
    colocate: bool = False
    """Trainers and engines share devices and take turns: one sleeps while the other works."""
    step_deadline: Seconds = 3600
    """Seconds that a step waits for its rollouts."""

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.steps * self.updates_per_step


def batches_in_flight(rollout: Rollout, schedule: Schedule) -> float:
    """Returns the number of groups in flight while a step waits, as a multiple of `rollout.prompts_per_step`."""
    return rollout.over_sampling or float(max(1, schedule.max_staleness + 1 - schedule.window))
