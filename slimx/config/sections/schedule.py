"""Section schedule: what happens at which step, and how far generation runs ahead."""

from __future__ import annotations

from slimx.config.section import Amount, Count, Seconds, Section
from slimx.config.sections.rollout import Rollout


class Schedule(Section):
    steps: Amount = 100
    """Steps of the run: one trains prompts_per_step x group_size rollouts and publishes once."""
    updates_per_step: Amount = 1
    """Optimizer updates per step, each on prompts_per_step / updates_per_step whole groups; the ratio of the loss stays
    that to the policy that sampled."""
    max_staleness: Count = 0
    """Versions that the oldest token of a trajectory may be behind when it is trained: 0 synchronous, 1 one step off,
    more: fully asynchronous."""
    window: Count = 0
    """Batches of groups by which a finished group may overtake an unfinished older one, at most max_staleness; 0:
    groups are trained in the order of their prompts."""
    straggler_deadline: Seconds | None = None
    """Seconds that a batch waits for unfinished groups that may not be overtaken, once enough others are done; then
    they are given up and counted as dropped/straggler; null: they are waited for."""
    colocate: bool = False
    """Trainers and engines share devices: sleep and wake in turns."""
    step_deadline: Seconds = 3600
    """Seconds to wait for a step's rollouts."""

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.steps * self.updates_per_step


def batches_in_flight(rollout: Rollout, schedule: Schedule) -> float:
    """Groups that are open while a step waits for its own, over `rollout.prompts_per_step`."""
    return rollout.over_sampling or float(max(1, schedule.max_staleness + 1 - schedule.window))
