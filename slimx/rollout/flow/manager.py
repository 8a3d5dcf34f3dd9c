"""Keeps the right number of groups in flight and returns batches, without exceeding the staleness bound.

Every admitted prompt gets a *ticket*, the numbered entry of its group in the queue. Groups are trained on in the order
of their tickets (within `schedule.window`), so the step in which a group is trained on does not depend on timing.
`slimx/rollout/flow/tickets.py` contains the rules of admission and selection that keep every trajectory within
`schedule.max_staleness` versions.

    next_batch: open the gate --> admit, drop, wait, ... --> select --> close the gate, if engines rest

With `max_staleness` 0, or with `rollout.partial`, engines rest while trainers train: requests are interrupted, and
their tokens kept. Otherwise requests continue, and after a publication later tokens of the same trajectory have a newer
version.
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
"""Drop reason for a group beyond the staleness bound; its ticket stays in the queue, to be generated again."""
STOP_S = 10.0
"""Number of seconds that `stop` waits for cancelled rollouts to end."""


async def _nothing() -> None: ...


class RolloutManager:
    """Manager of rollouts: admits prompts, generates their groups, and returns batches of finished groups."""

    def __init__(
        self,
        config: Config,
        source: DataSource,
        maker: GroupMaker,
        on_drop: Callable[[Dropped], None] = lambda dropped: None,
        abort: Callable[[], Awaitable[None]] = _nothing,
    ):
        """Creates an empty queue. `maker` generates groups. `on_drop` is called for every group that is not trained on;
        after `restore`, it is called again for the dropped groups that no batch has counted yet. `abort` makes all
        engines end their requests, which return their tokens so far."""
        self.config = config
        self.source = source
        self.maker = maker
        self.on_drop = on_drop
        self.abort = abort
        self.rules = Rules.of(config)
        self.rests = config.schedule.max_staleness == 0 or config.rollout.partial
        """True if engines are idle while trainers train."""
        self.waiting_since: float | None = None
        """Unix time at which the current call of `next_batch` began to wait; None if no call is waiting."""
        self._tickets: list[Ticket] = []
        self._next = 0
        self._dropped: list[Dropped] = []
        """Groups dropped since the previous batch, which the next batch counts by reason."""
        self._failures: list[Dropped] = []
        self._regenerated = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._left: set[asyncio.Task[None]] = set()
        """Cancelled tasks of dropped or regenerated groups, which may still be cleaning up."""

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Tickets of all admitted prompts that have been neither returned in a batch nor dropped, ordered by number."""
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

        A group that is dropped, or that delays a batch for longer than `schedule.straggler_deadline`, is replaced by a
        group for a new prompt. Raises SlimxError if more than `rollout.max_failed_share` of a batch failed, and
        DeadlineError after `schedule.step_deadline`. A cancelled call takes no group out of the queue.
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
        """Interrupts all requests until `next_batch` is called again; the tokens sampled so far are kept."""
        await self.maker.gate.close(self.abort, self.config.rollout.interrupt_deadline)

    def admit(self) -> None:
        """Starts groups until the number of open tickets reaches the limit that applies while a batch is awaited."""
        self._admit(self.rules.max_open)

    async def stop(self) -> None:
        """Cancels all tasks and waits up to `STOP_S` for them to end; a hook that ignores its cancellation is left
        running."""
        tasks = [*self._left, *(ticket.task for ticket in self._tickets if ticket.task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        self.maker.close()

    def state(self) -> Json:
        """Returns the state for a checkpoint: the cursor of the prompt source, all open tickets, and the dropped groups
        that no batch has counted yet."""
        return {
            "source": self.source.state(),
            "next": self._next,
            "tickets": [SavedTicket.of(ticket) for ticket in self._tickets],
            "dropped": [asdict(dropped) for dropped in self._dropped],
        }

    def counting(self, current: int, done: int) -> int:
        """Returns the step that counts a group dropped now among its dropped groups: the step of the next batch.
        `current`: step in progress. `done`: number of completed steps."""
        if self.waiting_since is not None:
            return current
        return max(current, done) + 1

    def status(self) -> Json:
        """Returns a summary for `slimx status`.

        open: number of open tickets; generating: number of open tickets whose group is being generated; done: number of
        open tickets whose group is finished; held: number of prompts that start only after the next publication; rests:
        true if engines are idle while trainers train; requests: number of requests in flight; oldest: the first ticket
        whose group is being generated, for which later tickets wait.
        """
        waiting = self.waiting_since is not None
        begun = next((ticket for ticket in self._tickets if ticket.running), None)
        return {
            "open": len(self._tickets),
            "generating": self.in_flight,
            "done": sum(ticket.outcome is not None for ticket in self._tickets),
            "held": 0 if waiting else max(0, self.rules.max_open - len(self._tickets)),
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
            "version": ticket.oldest_version,
            "due": ticket.oldest_version + self.rules.staleness + 1,
            "done": ticket.progress.complete,
            "rollouts": self._rollouts_per_group,
        }

    def restore(self, state: Json) -> None:
        """Continues from `state`, as returned by `state()`. Keeps complete groups and the tokens already sampled for
        incomplete groups; these groups are continued with the same seeds once a batch is awaited."""
        self.source.restore(state["source"])
        self._next = state["next"]
        for saved in state["tickets"]:
            self._tickets.append(saved.restore())
        for dropped in state["dropped"]:
            self._drop(Dropped(**dropped))

    def restart(self, state: Json) -> int:
        """Discards the groups of `state` and continues its ticket numbers with new prompts and seeds. Returns the
        number of discarded groups."""
        self._next = state["next"]
        return len(state["tickets"])

    # Tickets ----------------------------------------------------------------------------------------------------------

    async def _selected(self) -> list[Ticket]:
        patience = self.config.schedule.straggler_deadline
        give_up_at: float | None = None
        """Time, by the clock `Outage.time`, at which the straggler is dropped; None without a straggler or without a
        deadline."""
        while True:
            self._changed.clear()
            self._settle()
            self._check_failures()
            self.admit()
            taken = self.rules.select(self._tickets, self.maker.version)
            if taken is not None:
                if not self._too_old(taken):
                    return taken
                give_up_at = None  # regenerated groups have just started
                continue
            straggler = self.rules.straggler(self._tickets)
            if straggler is None or patience is None:
                give_up_at = None
                await self._changed.wait()
                continue
            give_up_at = give_up_at or self.maker.outage.time() + patience
            in_time = await self._changed_by(give_up_at)
            if not in_time and straggler.outcome is None:  # the group may have finished at the last moment
                self._give_up(straggler)

    async def _changed_by(self, moment: float) -> bool:
        """Waits until a group is done. Returns False if no group is done before `Outage.time` reaches `moment`."""
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
        """Starts the groups of waiting tickets, then groups of new prompts, until `room` tickets are open."""
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
            ticket.oldest_version = self.maker.version
        ticket.since = time.time()
        ticket.task = asyncio.create_task(self._run(ticket, ticket.progress))

    async def _run(self, ticket: Ticket, progress: GroupProgress) -> None:
        try:
            outcome = await self.maker.make(
                ticket.prompt, group_id=f"g{ticket.number}", number=ticket.number, progress=progress
            )
            if ticket.task is not asyncio.current_task():
                return  # the group was cancelled just when it finished
            ticket.outcome = outcome
            if self.waiting_since is None and not self.rests:
                # Trainers are training: a replacement of a dropped group starts with the current version, but is for
                # a batch after the next publication.
                self._settle()
                self._admit(self.rules.max_open - self.rules.size)
        except Exception as error:
            # A rollout's failure is an outcome, but a bug must reach the training loop instead of vanishing in a task.
            self._error = error
        self._changed.set()

    def _settle(self) -> None:
        """Drops the groups that failed or were filtered out. Raises the exception of a group's task, if any."""
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
            # Unresponsive engines may respond after a restart; other failures would repeat.
            silent = all(failure.reason == ENGINE_DEADLINE for failure in self._failures)
            raise (PartLost if silent else SlimxError)(
                f"{len(self._failures)} of rollout.prompts_per_step={self.config.rollout.prompts_per_step} groups "
                f"failed, more than rollout.max_failed_share={self.config.rollout.max_failed_share} allows; the "
                f"last failure is {last.reason}, {last.detail}; correct its cause, which `slimx doctor FILE --hooks` "
                "shows if it is in a hook, or raise rollout.max_failed_share",
                code="rollout.failed",
                about="rollout.max_failed_share",
            )

    def _give_up(self, straggler: Ticket) -> None:
        """Drops an unfinished group that delays a batch, so that the next group in order replaces it."""
        detail = (
            f"only {straggler.progress.complete} of {self._rollouts_per_group} rollouts were done after "
            f"{time.time() - straggler.since:.0f} s, and a batch waited for this group alone for longer than "
            f"schedule.straggler_deadline={self.config.schedule.straggler_deadline:g} s"
        )
        self._cancel(straggler)
        group = Group(id=f"g{straggler.number}", prompt=straggler.prompt, trajectories=[])
        straggler.outcome = GroupOutcome(group, STRAGGLER, detail)

    def _too_old(self, taken: Sequence[Ticket]) -> bool:
        """Drops those of the selected groups `taken` that exceed the staleness bound, to be generated again; returns
        True if there are any. This occurs only after a restart from a checkpoint with other settings, because the rules
        of admission and selection otherwise prevent it."""
        version = self.maker.version
        bound = self.config.schedule.max_staleness
        too_old = False
        for ticket in taken:
            trajectory = older_trajectory(ticket.group, version - bound)
            if trajectory is None:
                continue
            detail = (
                f"trajectory {trajectory.id} has tokens of version {trajectory.oldest_version}, too old to be trained "
                f"at version {version} with schedule.max_staleness={bound}"
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
        """Passes the outcomes of a batch's prompts, and of prompts whose groups were dropped since the previous batch,
        to the prompt source's method `learn`, if it has one. If a group was too old, its prompt is reported only after
        the group has been generated again."""
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
            raise SlimxError(
                f"rollout.source: {self.config.rollout.source}.learn raised {raised(error)}; correct the method",
                code="sources.raised",
                about="rollout.source",
            ) from error

    def _regenerate(self, ticket: Ticket) -> None:
        """Discards the results of `ticket`; its group restarts with the same seeds once a batch is awaited."""
        self._cancel(ticket)
        ticket.outcome = None
        ticket.progress = GroupProgress()

    def _cancel(self, ticket: Ticket) -> None:
        """Cancels the task of `ticket`, if it has one."""
        if ticket.task is not None:
            ticket.task.cancel()
            self._left.add(ticket.task)
            ticket.task.add_done_callback(self._left.discard)
            ticket.task = None

    def _awaited(self) -> str:
        """Returns a description of the groups that a late batch still lacks, for an error message."""
        size = self.rules.size
        # If this batch's groups are done but the window allows no batch, later unfinished groups delay it.
        waiting = _unfinished(self._tickets[:size]) or _unfinished(self._tickets)
        return f"{len(waiting)} of {size} groups of this step (first: prompt {waiting[0]})"


def _unfinished(tickets: Sequence[Ticket]) -> list[str]:
    """Returns the prompt ids of the tickets whose group is not finished."""
    return [ticket.prompt.id for ticket in tickets if ticket.outcome is None]
