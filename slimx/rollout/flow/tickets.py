"""Tickets of admitted prompts, and which of them a step trains: pure rules on a queue, without tasks or clocks.

Batch s is trained by the trainers' version s. A ticket whose rollouts began under version b may be trained by batch
b + max_staleness at the latest: that is when it is *due*. Two rules keep every ticket in time:

- Admission: at most ceil(over_sampling * prompts_per_step) tickets are open while a batch is waited for. By default
  that is max_staleness + 1 - window batches, so that even a ticket at the end of the queue, overtaken as often as the
  window allows, is not late.
- Selection: a finished group may overtake an unfinished older one by less than `window` batches of tickets, and only as
  long as all that stay behind can still be trained in time.

An unfinished group that may not be overtaken is a *straggler* as soon as enough others are done for a batch: the batch
waits for it alone. With `schedule.straggler_deadline` it does so no longer than that.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slimx.config.schema import Config
from slimx.config.sections.schedule import batches_in_flight
from slimx.data.records import Group, Prompt
from slimx.rollout.flow.progress import GroupProgress, SavedRollout
from slimx.rollout.flow.rollouts import GroupOutcome, broke


@dataclass(slots=True)
class Ticket:
    """One admitted prompt."""

    number: int
    prompt: Prompt
    born: int = 0
    """The oldest weight version that its rollouts may have been sampled by."""
    outcome: GroupOutcome | None = None
    task: asyncio.Task[None] | None = None
    """None: it waits to be started."""
    since: float = 0.0
    """Unix seconds at which it was started last."""
    progress: GroupProgress = field(default_factory=GroupProgress)
    """The finished part of a group that is not complete."""

    @property
    def running(self) -> bool:
        """True while its group is being generated."""
        return self.task is not None and self.outcome is None

    @property
    def waits(self) -> bool:
        """True while its group is still to be begun."""
        return self.task is None and self.outcome is None


@dataclass(slots=True)
class Batch:
    """The groups of one step, and what became of others while they were waited for."""

    groups: list[Group]
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by reason."""
    regenerated: int = 0
    """Groups that were begun, or even done, and are generated anew, because no step could train them in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A group that is not trained."""

    group: str
    prompt: str
    """Id of its prompt."""
    reason: str
    detail: str | None = None
    """The first exception's text."""
    rewards: tuple[float, ...] = ()
    """Rewards of its rollouts, as many as there are."""

    @property
    def failed(self) -> bool:
        """True if something broke; see `broke`."""
        return broke(self.reason)

    @classmethod
    def of(cls, outcome: GroupOutcome) -> Dropped:
        assert outcome.group is not None and outcome.reason is not None
        return cls(
            group=outcome.group.id,
            prompt=outcome.group.prompt.id,
            reason=outcome.reason,
            detail=outcome.detail,
            rewards=rewards_of(outcome.group),
        )


def rewards_of(group: Group) -> tuple[float, ...]:
    """Rewards of the rollouts of a group that have one, in their order."""
    return tuple(float(each.reward) for each in group.trajectories if each.reward is not None)


@dataclass(kw_only=True, slots=True)
class SavedTicket:
    """A ticket as a checkpoint keeps it: with its group if that is complete, else with what is done of it."""

    number: int
    prompt: Prompt
    group: Group | None
    born: int = 0
    rollouts: list[SavedRollout] = field(default_factory=list)
    """Rollouts of a group that is not complete."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of how many tickets are open and which are trained next."""

    size: int
    """Groups of a batch."""
    room: int
    """Tickets that are open while a batch is waited for."""
    staleness: int
    """Versions that a trajectory may be behind."""
    window: int
    """Batches by which a finished group may overtake an unfinished older one."""

    @classmethod
    def of(cls, config: Config) -> Rules:
        size, schedule = config.rollout.prompts_per_step, config.schedule
        room = math.ceil(batches_in_flight(config.rollout, schedule) * size)
        return cls(size, room, schedule.max_staleness, schedule.window)

    def select(self, queue: Sequence[Ticket], version: int) -> list[Ticket] | None:
        """The tickets of `queue` (in the order of their numbers) that the next batch trains; None: wait.

        `version`: of the trainers, who will train it."""
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
                return taken if self._in_time(queue, taken, version) else None
        return None

    def straggler(self, queue: Sequence[Ticket]) -> Ticket | None:
        """The ticket that a batch waits for while `select` gives none, though enough groups are done; None: too few."""
        unfinished = [ticket for ticket in queue if ticket.outcome is None]
        return unfinished[0] if unfinished and len(queue) - len(unfinished) >= self.size else None

    def late(self, ticket: Ticket, version: int) -> bool:
        """Returns True if `ticket` could not be trained any more by the trainers' `version`."""
        return not ticket.waits and ticket.born + self.staleness < version

    def _in_time(self, queue: Sequence[Ticket], taken: Sequence[Ticket], version: int) -> bool:
        """Returns True if the tickets that stay behind are in time, one after another from the next batch on; those
        that would be late in strict order too are surplus."""
        numbers, behind = {ticket.number for ticket in taken}, 0
        for place, ticket in enumerate(queue):
            if ticket.number in numbers:
                continue
            strictly = self.late(ticket, version + place // self.size)
            if self.late(ticket, version + 1 + behind // self.size) and not strictly:
                return False
            behind += 1
        return True
