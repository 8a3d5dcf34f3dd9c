"""The queue of tickets, one per admitted prompt, and the rules by which a step selects its batch.

The rules are pure functions of the queue, without tasks or clocks. The trainers train on batch s at their weight
version s. A ticket whose rollouts started under version b must be in batch b + max_staleness at the latest, or it is
*late*. Two rules keep every ticket in time:

- Admission: at most ceil(over_sampling * prompts_per_step) tickets are open while a batch is awaited. By default
  that is max_staleness + 1 - window batches: even a ticket at the end of the queue, overtaken as often as the
  window allows, is not late.
- Selection: a finished group may overtake an unfinished older one by less than `window` batches of tickets, and only
  if all tickets that remain can still be in time.

A *straggler* is an unfinished group that must not be overtaken and for which alone a batch waits, because enough other
groups are done. The batch waits no longer than `schedule.straggler_deadline`, if that is set.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slimx.config.schema import Config
from slimx.config.sections.rollout import batches_in_flight
from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout.flow.progress import GroupProgress, SavedRollout
from slimx.rollout.flow.rollouts import GroupOutcome, is_failure


@dataclass(slots=True)
class Ticket:
    """One admitted prompt and the state of its group."""

    number: int
    prompt: Prompt
    oldest_version: int = 0
    """Oldest weight version that may have sampled tokens of the ticket's rollouts."""
    outcome: GroupOutcome | None = None
    task: asyncio.Task[None] | None = None
    """Task that generates the group; None if it has not been started, or was restored as finished."""
    since: float = 0.0
    """Unix time at which the group was last started."""
    progress: GroupProgress = field(default_factory=GroupProgress)
    """Trajectories and completions collected so far for an incomplete group."""

    @property
    def running(self) -> bool:
        """True while the ticket's group is being generated."""
        return self.task is not None and self.outcome is None

    @property
    def waits(self) -> bool:
        """True until generation of the ticket's group starts."""
        return self.task is None and self.outcome is None

    @property
    def group(self) -> Group:
        """Group of the ticket, which must be finished."""
        assert self.outcome is not None
        return self.outcome.group


@dataclass(slots=True)
class Batch:
    """The groups of one step, with the numbers of groups that were dropped or regenerated since the previous batch."""

    groups: list[Group]
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups, by drop reason."""
    regenerated: int = 0
    """Number of started or finished groups that are generated again because they were too old for any later step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """Record of a group that is not trained on, with the reason."""

    group: str
    prompt: str
    """Id of the group's prompt."""
    reason: str
    detail: str | None = None
    """Explanation of the drop reason, such as the message of the first error; None if there is none."""
    rewards: tuple[float, ...] = ()
    """Rewards of the group's trajectories, in order; trajectories without a reward are left out."""

    @property
    def failed(self) -> bool:
        """True if the group failed, rather than being dropped by a filter or as a straggler."""
        return is_failure(self.reason)

    @classmethod
    def of(cls, outcome: GroupOutcome) -> Dropped:
        """Returns the record of the dropped group in `outcome`, whose drop reason must not be None."""
        assert outcome.reason is not None
        return cls(
            group=outcome.group.id,
            prompt=outcome.group.prompt.id,
            reason=outcome.reason,
            detail=outcome.detail,
            rewards=rewards_of(outcome.group),
        )


def rewards_of(group: Group) -> tuple[float, ...]:
    """Returns the rewards of the group's trajectories, in order, without those that have none."""
    return tuple(float(trajectory.reward) for trajectory in group.trajectories if trajectory.reward is not None)


def older_trajectory(group: Group, bound: int) -> Trajectory | None:
    """Returns a trajectory that contains a token sampled by a version older than `bound`, or None if there is none."""
    for trajectory in group.trajectories:
        if trajectory.oldest_version is not None and trajectory.oldest_version < bound:
            return trajectory
    return None


@dataclass(kw_only=True, slots=True)
class SavedTicket:
    """A ticket as stored in a checkpoint, with its group if the group is complete, and otherwise with the group's
    progress."""

    number: int
    prompt: Prompt
    group: Group | None
    oldest_version: int = 0
    """Oldest weight version that may have sampled tokens of the ticket's rollouts (`Ticket.oldest_version`)."""
    rollouts: list[SavedRollout] = field(default_factory=list)
    """Rollouts of an incomplete group; empty for a complete one."""

    @classmethod
    def of(cls, ticket: Ticket) -> SavedTicket:
        """Converts `ticket` to the form in which a checkpoint stores it."""
        group = None
        if ticket.outcome is not None and ticket.outcome.reason is None:
            group = ticket.group
        return cls(
            number=ticket.number,
            prompt=ticket.prompt,
            group=group,
            oldest_version=ticket.oldest_version,
            rollouts=ticket.progress.save() if group is None else [],
        )

    def restore(self) -> Ticket:
        """Restores the ticket with the progress of its saved rollouts, from which generation continues."""
        ticket = Ticket(self.number, self.prompt, self.oldest_version, progress=GroupProgress.restore(self.rollouts))
        if self.group is not None:
            ticket.outcome = GroupOutcome(self.group)
        return ticket


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that limit the number of open tickets and select the tickets of a batch."""

    size: int
    """Number of groups in a batch."""
    max_open: int
    """Maximum number of open tickets while a batch is awaited."""
    staleness: int
    """Maximum age of a trajectory in weight versions."""
    window: int
    """Number of batches by which a finished group may overtake an unfinished older one."""

    @classmethod
    def of(cls, config: Config) -> Rules:
        """Returns the rules for tickets and batches that follow from `config`."""
        size = config.rollout.prompts_per_step
        schedule = config.schedule
        max_open = math.ceil(batches_in_flight(config.rollout, schedule) * size)
        return cls(size, max_open, schedule.max_staleness, schedule.window)

    def select(self, queue: Sequence[Ticket], version: int) -> list[Ticket] | None:
        """Returns the tickets for the next batch, or None if it must wait for unfinished groups.

        `queue`: all open tickets, ordered by number. `version`: weight version of the trainers when they train on that
        batch.
        """
        taken: list[Ticket] = []
        oldest: int | None = None
        for ticket in queue:
            if oldest is not None and ticket.number - oldest > self.window * self.size:
                break
            if ticket.outcome is not None:
                taken.append(ticket)
            elif oldest is None:
                oldest = ticket.number
            if len(taken) == self.size:
                if self._in_time(queue, taken, version):
                    return taken
                return None
        return None

    def straggler(self, queue: Sequence[Ticket]) -> Ticket | None:
        """Returns the oldest unfinished ticket if enough groups of `queue` for a batch are finished; otherwise None."""
        unfinished = [ticket for ticket in queue if ticket.outcome is None]
        if unfinished and len(queue) - len(unfinished) >= self.size:
            return unfinished[0]
        return None

    def late(self, ticket: Ticket, version: int) -> bool:
        """Returns True if `ticket` has been started and is too old to train on at the trainers' `version`."""
        return not ticket.waits and ticket.oldest_version + self.staleness < version

    def _in_time(self, queue: Sequence[Ticket], taken: Sequence[Ticket], version: int) -> bool:
        """Returns True if the tickets of `queue` that are not in `taken` can still be trained on in time. Assumes that
        the following batches contain these tickets in order.

        Ignores tickets that would be late even if all batches were selected strictly in order.
        """
        numbers = {ticket.number for ticket in taken}
        behind = 0
        for position, ticket in enumerate(queue):
            if ticket.number in numbers:
                continue
            late_in_order = self.late(ticket, version + position // self.size)
            if self.late(ticket, version + 1 + behind // self.size) and not late_in_order:
                return False
            behind += 1
        return True
