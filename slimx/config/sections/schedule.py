"""Section `schedule`: number of steps and updates, and how far generation may run ahead of training."""

from __future__ import annotations

from slimx.config.section import Amount, Count, Seconds, Section
from slimx.config.sections.rollout import Rollout


class Schedule(Section):
    steps: Amount = 100
    """Number of steps in the run. Each trains on prompts_per_step x group_size rollouts and publishes the weights
    once."""
    updates_per_step: Amount = 1
    """Number of optimizer updates per step, each of which trains on prompts_per_step / updates_per_step whole groups.
    The importance ratio in every update's loss is relative to the policy that sampled the tokens."""
    max_staleness: Count = 0
    """Maximum number of weight versions by which the oldest token of a trajectory may lag behind the weights from which
    the training step starts. 0: synchronous; 1: one step off-policy; more: fully asynchronous."""
    window: Count = 0
    """Number of batches by which a finished group may overtake an older unfinished group; it must not exceed
    max_staleness. 0: groups are trained on in the order of their prompts."""
    straggler_deadline: Seconds | None = None
    """Seconds that a batch waits for unfinished groups that must not be overtaken, counted from the moment at which
    enough other groups have finished. After that these groups are dropped and counted as dropped/straggler. null: no
    limit."""
    colocate: bool = False
    """Run trainers and engines on the same devices, where they alternate: one sleeps while the other runs."""
    step_deadline: Seconds = 3600
    """Seconds within which all rollouts of a step must be ready."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates in the whole run."""
        return self.steps * self.updates_per_step


def batches_in_flight(rollout: Rollout, schedule: Schedule) -> float:
    """Returns the number of groups in flight while a step waits for rollouts, as a multiple of
    `rollout.prompts_per_step`."""
    return rollout.over_sampling or float(max(1, schedule.max_staleness + 1 - schedule.window))
