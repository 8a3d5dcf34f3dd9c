"""Keeps the right number of groups in flight and hands them out, step by step, none of them too old.

Every admitted prompt gets a ticket with a number, and tickets are trained in that order (as far as `schedule.window`
says), so that which group is trained when does not depend on timing. `slimx/rollout/flow/tickets.py` has the rules of
admission and selection that keep every trajectory within `schedule.max_staleness` versions.

    next_batch: open the gate --> admit, drop, wait, ... --> select --> rest, if engines rest while trainers train

Engines rest where nothing could be generated ahead (max_staleness 0), or where `rollout.partial` says so: requests are
then interrupted, with their tokens kept. Otherwise they go on, and a publication in between gives later tokens of the
same trajectory a newer version.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from slimx.config.schema import Config
from slimx.data.prompts.read import DataSource, Outcome
from slimx.data.records import Group, Trajectory
from slimx.errors import DeadlineError, PartLost, SlimxError, raised
from slimx.rollout.flow.progress import GroupProgress
from slimx.rollout.flow.rollouts import STRAGGLER, GroupMaker, GroupOutcome
from slimx.rollout.flow.tickets import Batch, Dropped, Rules, SavedTicket, Ticket, rewards_of
from slimx.rollout.hooks import ENGINE_DEADLINE
from slimx.runtime.clocks import Clock

TOO_OLD = "too old"
"""Reason of a group beyond the bound of staleness; its ticket stays, and its prompt is generated anew."""
STOP_S = 10.0
"""Seconds that cancelled rollouts get to end."""


async def _nothing() -> None: ...


class RolloutManager:
    """Admits prompts, runs their rollouts, returns batches."""

    def __init__(
        self,
        config: Config,
        source: DataSource,
        maker: GroupMaker,
        on_drop: Callable[[Dropped], None] = lambda dropped: None,
        abort: Callable[[], Awaitable[None]] = _nothing,
    ):
        """`on_drop` is told of every group that is not trained, with its reason, and after `restore` once more of those
        that no batch has counted yet. `abort` has all engines end their requests, which then bring what they have."""
        self.config, self.source, self.maker, self.on_drop, self.abort = config, source, maker, on_drop, abort
        self.rules = Rules.of(config)
        self.rests = config.schedule.max_staleness == 0 or config.rollout.partial
        """True if engines rest while trainers train."""
        self.waiting_since: float | None = None
        """Unix seconds since which a batch is waited for."""
        self._tickets: list[Ticket] = []
        self._next = 0
        self._dropped: list[Dropped] = []
        """Groups that the next batch counts."""
        self._failures: list[Dropped] = []
        self._regenerated = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._left: set[asyncio.Task[None]] = set()
        """Cancelled tasks of groups that are made no more, or anew; they may still clean up."""

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Tickets of all prompts that were admitted and neither trained nor dropped, by number."""
        return self._tickets

    @property
    def in_flight(self) -> int:
        """Groups that are being generated."""
        return sum(ticket.running for ticket in self._tickets)

    @property
    def _rollouts_per_group(self) -> int:
        return self.config.rollout.group_size + (self.config.algorithm.advantages.kind == "remax")

    async def next_batch(self) -> Batch:
        """The next `prompts_per_step` groups, waiting for them.

        A dropped group is replaced by a new prompt, and so is one that holds a batch up for longer than
        `schedule.straggler_deadline`. Raises SlimxError when more than `rollout.max_failed_share` of a
        batch failed, and DeadlineError when `schedule.step_deadline` passes. Cancelled, it has taken nothing.
        """
        deadline = self.config.schedule.step_deadline
        self.waiting_since = time.time()
        self.maker.gate.open()
        clock = Clock(deadline)
        try:
            async with clock:
                with self.maker.outage.stops(clock):
                    taken = await self._selected()
        except TimeoutError:
            raise DeadlineError(self._awaited(), deadline, self.config.rollout.generate) from None
        finally:
            self.waiting_since = None
        if self.rests:
            await self.rest()
        return self._hand_out(taken)

    async def rest(self) -> None:
        """Interrupt what is in flight until the next batch is waited for. No token of it is lost."""
        await self.maker.gate.close(self.abort, self.config.rollout.interrupt_deadline)

    def admit(self) -> None:
        """Start as many groups as may be open while a batch is waited for."""
        self._admit(self.rules.room)

    async def stop(self) -> None:
        """Cancel what is in flight and wait until it has ended; a hook that will not be cancelled is left to itself."""
        tasks = [*self._left, *(ticket.task for ticket in self._tickets if ticket.task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        self.maker.close()

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: the source's cursor, every ticket that is not trained yet, and the dropped
        groups that no batch has counted yet: the step whose records name them is still to come."""
        return {
            "source": self.source.state(),
            "next": self._next,
            "tickets": [_saved(t) for t in self._tickets],
            "dropped": [asdict(dropped) for dropped in self._dropped],
        }

    def counting(self, current: int, done: int) -> int:
        """The step whose batch counts a group that is dropped now. `current`: step in progress, `done`: steps done."""
        return current if self.waiting_since is not None else max(current, done) + 1

    def status(self) -> dict[str, Any]:
        """Summary of what is in flight, for `slimx status`.

        open: tickets; generating, done: of these; held: prompts that may begin only after the next publication; rests:
        whether engines rest while trainers train; requests: out now; oldest: the ticket that all others wait for."""
        waiting = self.waiting_since is not None
        begun = next((ticket for ticket in self._tickets if ticket.running), None)
        return {
            "open": len(self._tickets),
            "generating": self.in_flight,
            "done": sum(ticket.outcome is not None for ticket in self._tickets),
            "held": 0 if waiting else max(0, self.rules.room - len(self._tickets)),
            "rests": self.rests,
            "requests": self.maker.gate.out,
            "waiting_since": self.waiting_since,
            "oldest": None if begun is None else self._status_of(begun),
        }

    def _status_of(self, ticket: Ticket) -> dict[str, Any]:
        return {
            "group": f"g{ticket.number}",
            "prompt": ticket.prompt.id,
            "since": ticket.since,
            "version": ticket.born,
            "due": ticket.born + self.rules.staleness + 1,
            "done": len(ticket.progress.done),
            "rollouts": self._rollouts_per_group,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`: complete groups are kept; of the others what was sampled is kept, and the rest is
        generated with the same seeds, as soon as a batch is waited for."""
        self.source.restore(state["source"])
        self._next = state["next"]
        for saved in state["tickets"]:
            ticket = Ticket(saved.number, saved.prompt, saved.born, progress=GroupProgress.restore(saved.rollouts))
            if saved.group is not None:
                ticket.outcome = GroupOutcome(saved.group)
            self._tickets.append(ticket)
        for dropped in state["dropped"]:
            self._drop(Dropped(**dropped))

    def restart(self, state: dict[str, Any]) -> int:
        """Begin with this manager's own prompts after `state`, with seeds of its own; returns how many groups of
        `state` are left out."""
        self._next = state["next"]
        return len(state["tickets"])

    # Tickets ----------------------------------------------------------------------------------------------------------

    async def _selected(self) -> list[Ticket]:
        patience = self.config.schedule.straggler_deadline
        give_up_at: float | None = None
        """Moment of `Outage.time` at which a straggler is given up; None while too few groups are done, or where a
        straggler is waited for in any case."""
        while True:
            self._changed.clear()
            self._settle()
            self._check_failures()
            self.admit()
            taken = self.rules.select(self._tickets, self.maker.version)
            if taken is not None:
                if not self._too_old(taken):
                    return taken
                give_up_at = None  # what is generated anew has just begun
            else:
                straggler = self.rules.straggler(self._tickets)
                if straggler is None or patience is None:
                    give_up_at = None
                else:
                    give_up_at = give_up_at or self.maker.outage.time() + patience
                in_time = await self._changed_by(give_up_at)
                if not in_time and straggler.outcome is None:  # it may have been done in the last moment
                    self._give_up(straggler)

    async def _changed_by(self, moment: float | None) -> bool:
        """Wait until a group is done; False if none is by `moment` of `Outage.time` (None: any time)."""
        if moment is None:
            await self._changed.wait()
            return True
        outage = self.maker.outage
        clock = Clock(max(0.0, moment - outage.time()))
        try:
            async with clock:
                with outage.stops(clock):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _admit(self, room: int) -> None:
        """Start what waits and new prompts, up to `room` tickets in all."""
        for ticket in self._tickets[:room]:
            if ticket.waits:
                self._start(ticket)
        while len(self._tickets) < room:
            ticket = Ticket(self._next, self.source.next())
            self._next += 1
            self._tickets.append(ticket)
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        if not ticket.progress.begun:
            ticket.born = self.maker.version
        ticket.since = time.time()
        ticket.task = asyncio.create_task(self._run(ticket, ticket.progress))

    async def _run(self, ticket: Ticket, progress: GroupProgress) -> None:
        try:
            outcome = await self.maker.make(
                ticket.prompt, group_id=f"g{ticket.number}", number=ticket.number, progress=progress
            )
            if ticket.task is not asyncio.current_task():
                return  # it was cancelled, and ended by itself at the same moment
            ticket.outcome = outcome
            if self.waiting_since is None and not self.rests:
                # While trainers train: what takes the place of a dropped group is for one of the batches after the next
                # publication, and is begun by the version before.
                self._settle()
                self._admit(self.rules.room - self.rules.size)
        except Exception as error:
            # Not a rollout's failure (those are outcomes): a mistake of ours must reach the loop, not vanish in a task.
            self._error = error
        self._changed.set()

    def _settle(self) -> None:
        """Drop the groups that were not kept, and say why."""
        if self._error is not None:
            raise self._error
        for ticket in [t for t in self._tickets if t.outcome is not None and t.outcome.reason is not None]:
            self._tickets.remove(ticket)
            dropped = Dropped.of(ticket.outcome)
            self._drop(dropped)
            if dropped.failed:
                self._failures.append(dropped)

    def _drop(self, dropped: Dropped) -> None:
        self._dropped.append(dropped)
        self.on_drop(dropped)

    def _check_failures(self) -> None:
        limit = self.config.rollout.max_failed_share * self.config.rollout.prompts_per_step
        if len(self._failures) > limit:
            last = self._failures[-1]
            # Silent engines may answer after another start; whatever else failed would fail again.
            silent = all(failure.reason == ENGINE_DEADLINE for failure in self._failures)
            raise (PartLost if silent else SlimxError)(
                f"{len(self._failures)} groups of this step failed, more than rollout.max_failed_share="
                f"{self.config.rollout.max_failed_share} of {self.config.rollout.prompts_per_step} allows; "
                f"the last one: {last.reason}: {last.detail}",
                code="rollout.failed",
                about="rollout.max_failed_share",
            )

    def _give_up(self, straggler: Ticket) -> None:
        """Drop a group that holds a batch up, unfinished as it is: the next one in order takes its place."""
        detail = (
            f"{len(straggler.progress.done)} of {self._rollouts_per_group} rollouts were done "
            f"{time.time() - straggler.since:.0f} s after they were begun, and a batch waited for the others alone for "
            f"more than schedule.straggler_deadline={self.config.schedule.straggler_deadline:g} s"
        )
        self._cancel(straggler)
        group = Group(id=f"g{straggler.number}", prompt=straggler.prompt, trajectories=[])
        straggler.outcome = GroupOutcome(group, STRAGGLER, detail)

    def _too_old(self, taken: Sequence[Ticket]) -> bool:
        """Returns True if a group of `taken` is beyond the bound: it is dropped, named, and its prompt generated anew.

        Admission and selection allow none; one comes from a checkpoint of a run with other rules."""
        version, bound = self.maker.version, self.config.schedule.max_staleness
        old = [(t, trajectory) for t in taken if (trajectory := _oldest(t.outcome.group, version - bound)) is not None]
        for ticket, trajectory in old:
            detail = (
                f"trajectory {trajectory.id} was begun by version {trajectory.oldest_version} and would be trained by "
                f"version {version}, beyond schedule.max_staleness={bound}"
            )
            self._drop(Dropped.of(GroupOutcome(ticket.outcome.group, TOO_OLD, detail)))
            self._regenerate(ticket)
        return bool(old)

    def _hand_out(self, taken: list[Ticket]) -> Batch:
        chosen = {ticket.number for ticket in taken}
        self._tickets = [ticket for ticket in self._tickets if ticket.number not in chosen]
        for ticket in self._tickets:
            if self.rules.late(ticket, self.maker.version + 1):
                self._regenerate(ticket)
                self._regenerated += 1
        self._tell_source(taken)
        dropped = Counter(each.reason for each in self._dropped)
        batch = Batch([ticket.outcome.group for ticket in taken], dropped, self._regenerated)
        self._dropped, self._failures, self._regenerated = [], [], 0
        return batch

    def _tell_source(self, taken: Sequence[Ticket]) -> None:
        """Tell a source that learns what became of the prompts of a batch, and of those dropped meanwhile. One that was
        too old is generated again, and told of when it has ended."""
        learn = getattr(self.source, "learn", None)
        if learn is None:
            return
        dropped = [each for each in self._dropped if each.reason != TOO_OLD]
        ended = [(each.group, Outcome(each.prompt, each.rewards, each.reason)) for each in dropped]
        for ticket in taken:
            ended.append((f"g{ticket.number}", Outcome(ticket.prompt.id, rewards_of(ticket.outcome.group))))
        try:
            learn([outcome for _, outcome in sorted(ended, key=lambda one: int(one[0][1:]))])
        except Exception as error:
            name = self.config.rollout.source
            raise SlimxError(
                f"rollout.source: learn of {name} raised {raised(error)}", code="sources.raised", about="rollout.source"
            ) from error

    def _regenerate(self, ticket: Ticket) -> None:
        """Forget what was made of `ticket`: it is begun again, with the same seeds, when a batch is waited for."""
        self._cancel(ticket)
        ticket.outcome = None
        ticket.progress = GroupProgress()

    def _cancel(self, ticket: Ticket) -> None:
        """Take from `ticket` the task that makes its group, if one does."""
        if ticket.task is not None:
            ticket.task.cancel()
            self._left.add(ticket.task)
            ticket.task.add_done_callback(self._left.discard)
            ticket.task = None

    def _awaited(self) -> str:
        """The groups that a batch which does not come waits for."""
        want = self.rules.size
        # Of the tickets of this batch; of a later one where all of these are done, but too few for a window.
        waiting = [ticket.prompt.id for ticket in self._tickets[:want] if ticket.outcome is None] or [
            ticket.prompt.id for ticket in self._tickets if ticket.outcome is None
        ]
        return f"{len(waiting)} of {want} groups of this step (first: prompt {waiting[0]})"


def _saved(ticket: Ticket) -> SavedTicket:
    group = ticket.outcome.group if ticket.outcome is not None and ticket.outcome.reason is None else None
    return SavedTicket(
        number=ticket.number,
        prompt=ticket.prompt,
        group=group,
        born=ticket.born,
        rollouts=ticket.progress.save() if group is None else [],
    )


def _oldest(group: Group, bound: int) -> Trajectory | None:
    """A trajectory with a token of a version before `bound`."""
    return next((t for t in group.trajectories if t.oldest_version is not None and t.oldest_version < bound), None)
