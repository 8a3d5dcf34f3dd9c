"""Keeps the right number of groups in flight and returns them step by step, none of them too old.

Every admitted prompt gets a numbered ticket, and tickets are trained in that order (within `schedule.window`): the step
of a group does not depend on timing. `slimx/rollout/flow/tickets.py` contains the rules of admission and selection that
keep every trajectory within `schedule.max_staleness` versions.

    next_batch: open the gate --> admit, drop, wait, ... --> select --> rest, if engines rest while trainers train

Engines rest if nothing can be generated ahead (max_staleness 0), or with `rollout.partial`: requests are then
interrupted, and their tokens kept. Otherwise they continue, and after a publication later tokens of the same trajectory
have a newer version.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

from slimx.config.schema import Config
from slimx.data.prompts.read import DataSource, Outcome
from slimx.data.records import Group
from slimx.errors import DeadlineError, PartLost, SlimxError, raised
from slimx.json_types import Json
from slimx.rollout.flow.progress import GroupProgress
from slimx.rollout.flow.rollouts import STRAGGLER, GroupMaker, GroupOutcome
from slimx.rollout.flow.tickets import Batch, Dropped, Rules, SavedTicket, Ticket, older_trajectory, rewards_of
from slimx.rollout.hooks import ENGINE_DEADLINE
from slimx.runtime.clocks import Clock

TOO_OLD = "too old"
"""Reason of a group beyond the staleness bound; its ticket stays, and its prompt is generated again."""
STOP_S = 10.0
"""Time for cancelled rollouts to end, in seconds."""


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
        """Begins without tickets. `on_drop` is called for every group that is not trained, and after `restore` again
        for those that no batch has counted yet. `abort` makes all engines end their requests, which return their tokens
        so far."""
        self.config = config
        self.source = source
        self.maker = maker
        self.on_drop = on_drop
        self.abort = abort
        self.rules = Rules.of(config)
        self.rests = config.schedule.max_staleness == 0 or config.rollout.partial
        """True if engines rest while trainers train."""
        self.waiting_since: float | None = None
        """Unix time since which a batch is awaited."""
        self._tickets: list[Ticket] = []
        self._next = 0
        self._dropped: list[Dropped] = []
        """Dropped groups to be counted in the next batch."""
        self._failures: list[Dropped] = []
        self._regenerated = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._left: set[asyncio.Task[None]] = set()
        """Cancelled tasks of dropped or regenerated groups, which may still clean up."""

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Tickets of all admitted prompts that are neither trained nor dropped, by number."""
        return self._tickets

    @property
    def in_flight(self) -> int:
        """Number of groups that are being generated."""
        return sum(ticket.running for ticket in self._tickets)

    @property
    def _rollouts_per_group(self) -> int:
        greedy = 1 if self.config.algorithm.advantages.kind == "remax" else 0
        return self.config.rollout.group_size + greedy

    async def next_batch(self) -> Batch:
        """Waits for the next `prompts_per_step` groups and returns them.

        A dropped group is replaced by a new prompt, as is one that delays a batch for longer than
        `schedule.straggler_deadline`. Raises SlimxError if more than `rollout.max_failed_share` of a batch failed,
        DeadlineError after `schedule.step_deadline`. If cancelled, no group is taken.
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
        """Interrupts all requests until the next batch is awaited. No token is lost."""
        await self.maker.gate.close(self.abort, self.config.rollout.interrupt_deadline)

    def admit(self) -> None:
        """Starts as many groups as may be open while a batch is awaited."""
        self._admit(self.rules.room)

    async def stop(self) -> None:
        """Cancels all tasks and waits until they have ended; a hook that resists cancellation is abandoned."""
        tasks = [*self._left, *(ticket.task for ticket in self._tickets if ticket.task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        self.maker.close()

    def state(self) -> Json:
        """Returns the state for a resumed run: the source's cursor, all open tickets, and the dropped groups that no
        batch has counted yet, whose step is still to come."""
        return {
            "source": self.source.state(),
            "next": self._next,
            "tickets": [SavedTicket.of(ticket) for ticket in self._tickets],
            "dropped": [asdict(dropped) for dropped in self._dropped],
        }

    def counting(self, current: int, done: int) -> int:
        """Returns the step that counts a group dropped now. `current`: step in progress, `done`: completed steps."""
        if self.waiting_since is not None:
            return current
        return max(current, done) + 1

    def status(self) -> Json:
        """Returns a summary for `slimx status`.

        open: number of tickets; generating, done: parts of these; held: prompts that may begin only after the next
        publication; rests: true if engines rest while trainers train; requests: in flight; oldest: the ticket that all
        others wait for.
        """
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

    def _status_of(self, ticket: Ticket) -> Json:
        return {
            "group": f"g{ticket.number}",
            "prompt": ticket.prompt.id,
            "since": ticket.since,
            "version": ticket.born,
            "due": ticket.born + self.rules.staleness + 1,
            "done": len(ticket.progress.done),
            "rollouts": self._rollouts_per_group,
        }

    def restore(self, state: Json) -> None:
        """Continues from `state`: complete groups are kept; of others, sampled tokens are kept and the rest is
        generated with the same seeds, as soon as a batch is awaited."""
        self.source.restore(state["source"])
        self._next = state["next"]
        for saved in state["tickets"]:
            ticket = Ticket(saved.number, saved.prompt, saved.born, progress=GroupProgress.restore(saved.rollouts))
            if saved.group is not None:
                ticket.outcome = GroupOutcome(saved.group)
            self._tickets.append(ticket)
        for dropped in state["dropped"]:
            self._drop(Dropped(**dropped))

    def restart(self, state: Json) -> int:
        """Continues the ticket numbers of `state` with new prompts and seeds. Returns the number of discarded
        groups."""
        self._next = state["next"]
        return len(state["tickets"])

    # Tickets ----------------------------------------------------------------------------------------------------------

    async def _selected(self) -> list[Ticket]:
        patience = self.config.schedule.straggler_deadline
        give_up_at: float | None = None
        """`Outage.time` at which a straggler is dropped; None while too few groups are done, or without a deadline."""
        while True:
            self._changed.clear()
            self._settle()
            self._check_failures()
            self.admit()
            taken = self.rules.select(self._tickets, self.maker.version)
            if taken is not None:
                if not self._too_old(taken):
                    return taken
                give_up_at = None  # regenerated groups have just begun
                continue
            straggler = self.rules.straggler(self._tickets)
            if straggler is None or patience is None:
                give_up_at = None
                await self._changed.wait()
                continue
            give_up_at = give_up_at or self.maker.outage.time() + patience
            in_time = await self._changed_by(give_up_at)
            if not in_time and straggler.outcome is None:  # it may have finished at the last moment
                self._give_up(straggler)

    async def _changed_by(self, moment: float) -> bool:
        """Waits until a group is done. Returns False if none is at `moment` of `Outage.time`."""
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
        """Starts waiting tickets and new prompts, up to `room` tickets in total."""
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
                return  # it was cancelled at the moment it finished
            ticket.outcome = outcome
            if self.waiting_since is None and not self.rests:
                # While trainers train: the replacement of a dropped group is for a batch after the next publication,
                # and begins with the version before it.
                self._settle()
                self._admit(self.rules.room - self.rules.size)
        except Exception as error:
            # Not a rollout's failure (those are outcomes): a bug must reach the loop, not vanish in a task.
            self._error = error
        self._changed.set()

    def _settle(self) -> None:
        """Drops the groups that were not kept, with their reasons."""
        if self._error is not None:
            raise self._error
        for ticket in list(self._tickets):
            if ticket.outcome is None or ticket.outcome.reason is None:
                continue
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
            # Silent engines may respond after a restart; other failures would repeat.
            silent = all(failure.reason == ENGINE_DEADLINE for failure in self._failures)
            raise (PartLost if silent else SlimxError)(
                f"{len(self._failures)} groups of this step failed, more than rollout.max_failed_share="
                f"{self.config.rollout.max_failed_share} of {self.config.rollout.prompts_per_step} allows; "
                f"the last one: {last.reason}: {last.detail}",
                code="rollout.failed",
                about="rollout.max_failed_share",
            )

    def _give_up(self, straggler: Ticket) -> None:
        """Drops an unfinished group that delays a batch; the next one in order replaces it."""
        detail = (
            f"{len(straggler.progress.done)} of {self._rollouts_per_group} rollouts were done "
            f"{time.time() - straggler.since:.0f} s after they began, and a batch waited only for the others for more "
            f"than schedule.straggler_deadline={self.config.schedule.straggler_deadline:g} s"
        )
        self._cancel(straggler)
        group = Group(id=f"g{straggler.number}", prompt=straggler.prompt, trajectories=[])
        straggler.outcome = GroupOutcome(group, STRAGGLER, detail)

    def _too_old(self, taken: Sequence[Ticket]) -> bool:
        """Returns True if a group of `taken` is beyond the staleness bound; such groups are dropped and generated
        again.

        Admission and selection prevent that; only a checkpoint of a run with other rules can contain one.
        """
        version = self.maker.version
        bound = self.config.schedule.max_staleness
        too_old = False
        for ticket in taken:
            trajectory = older_trajectory(ticket.group, version - bound)
            if trajectory is None:
                continue
            detail = (
                f"trajectory {trajectory.id} was begun by version {trajectory.oldest_version} and would be trained by "
                f"version {version}, beyond schedule.max_staleness={bound}"
            )
            self._drop(Dropped.of(GroupOutcome(ticket.group, TOO_OLD, detail)))
            self._regenerate(ticket)
            too_old = True
        return too_old

    def _hand_out(self, taken: list[Ticket]) -> Batch:
        chosen = {ticket.number for ticket in taken}
        self._tickets = [ticket for ticket in self._tickets if ticket.number not in chosen]
        for ticket in self._tickets:
            if self.rules.late(ticket, self.maker.version + 1):
                self._regenerate(ticket)
                self._regenerated += 1
        self._tell_source(taken)
        reasons = Counter(dropped.reason for dropped in self._dropped)
        batch = Batch([ticket.group for ticket in taken], reasons, self._regenerated)
        self._dropped = []
        self._failures = []
        self._regenerated = 0
        return batch

    def _tell_source(self, taken: Sequence[Ticket]) -> None:
        """Passes the outcomes of a batch's prompts, and of those dropped meanwhile, to a source that learns from them.
        A group that was too old is generated again and reported later."""
        learn = getattr(self.source, "learn", None)
        if learn is None:
            return
        outcomes: dict[int, Outcome] = {}
        for dropped in self._dropped:
            if dropped.reason != TOO_OLD:
                number = int(dropped.group.removeprefix("g"))
                outcomes[number] = Outcome(dropped.prompt, dropped.rewards, dropped.reason)
        for ticket in taken:
            outcomes[ticket.number] = Outcome(ticket.prompt.id, rewards_of(ticket.group))
        try:
            learn([outcomes[number] for number in sorted(outcomes)])
        except Exception as error:
            name = self.config.rollout.source
            raise SlimxError(
                f"rollout.source: learn of {name} raised {raised(error)}", code="sources.raised", about="rollout.source"
            ) from error

    def _regenerate(self, ticket: Ticket) -> None:
        """Discards the results of `ticket`: it begins again with the same seeds when a batch is awaited."""
        self._cancel(ticket)
        ticket.outcome = None
        ticket.progress = GroupProgress()

    def _cancel(self, ticket: Ticket) -> None:
        """Cancels the task of `ticket`, if any."""
        if ticket.task is not None:
            ticket.task.cancel()
            self._left.add(ticket.task)
            ticket.task.add_done_callback(self._left.discard)
            ticket.task = None

    def _awaited(self) -> str:
        """Returns a description of the groups for which a late batch waits."""
        size = self.rules.size
        # Unfinished groups of this batch; of later ones if these are done but the window does not allow a batch.
        waiting = _unfinished(self._tickets[:size]) or _unfinished(self._tickets)
        return f"{len(waiting)} of {size} groups of this step (first: prompt {waiting[0]})"


def _unfinished(tickets: Sequence[Ticket]) -> list[str]:
    """Returns the prompt ids of unfinished groups."""
    return [ticket.prompt.id for ticket in tickets if ticket.outcome is None]
