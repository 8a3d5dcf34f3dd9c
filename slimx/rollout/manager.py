"""Keeps the right number of groups in flight and hands them out in the order of their prompts.

Every admitted prompt gets a ticket with a number. Step s trains the s-th `prompts_per_step` kept groups in ticket
order, so that which group is trained when does not depend on timing, and staleness is bounded by admission alone: a
ticket that will be trained at step c is admitted at step c - max_staleness at the earliest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slimx.config.schema import Config
from slimx.data.prompts import DataSource
from slimx.data.records import Group, Prompt
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout.rollouts import GroupMaker, Outcome

STOP_S = 10.0
"""Seconds that cancelled rollouts get to end."""


@dataclass(slots=True)
class Ticket:
    """One admitted prompt."""

    number: int
    prompt: Prompt
    outcome: Outcome | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Batch:
    """The groups of one step, and what was dropped while they were waited for."""

    groups: list[Group]
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by reason."""


@dataclass(kw_only=True, slots=True)
class SavedTicket:
    """A ticket as a checkpoint keeps it: with its group if that is complete, else to be generated again."""

    number: int
    prompt: Prompt
    group: Group | None


class RolloutManager:
    """Admits prompts, runs their rollouts, returns batches."""

    def __init__(
        self,
        config: Config,
        source: DataSource,
        maker: GroupMaker,
        on_drop: Callable[[Outcome], None] = lambda outcome: None,
    ):
        """`on_drop` is told of every group that is not trained, with its reason."""
        self.config, self.source, self.maker, self.on_drop = config, source, maker, on_drop
        self._tickets: list[Ticket] = []
        self._next = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Groups that are being generated."""
        return sum(ticket.outcome is None for ticket in self._tickets)

    def admit(self) -> None:
        """Start as many groups as the staleness bound allows: (max_staleness + 1) batches waiting or in flight."""
        room = (self.config.schedule.max_staleness + 1) * self.config.rollout.prompts_per_step
        while len(self._tickets) < room:
            self._start(Ticket(self._next, self.source.next()))
            self._next += 1

    async def next_batch(self) -> Batch:
        """The next `prompts_per_step` groups in ticket order, waiting for the oldest ones.

        A dropped group is replaced by a new prompt. Raises SlimxError when more than `rollout.max_failed_share` of a
        batch failed, and DeadlineError when `schedule.step_deadline` passes.
        """
        want, deadline = self.config.rollout.prompts_per_step, self.config.schedule.step_deadline
        dropped: Counter[str] = Counter()
        failures: list[Outcome] = []
        try:
            async with asyncio.timeout(deadline):
                while True:
                    self._changed.clear()
                    self._drop(dropped, failures)
                    self.admit()
                    head = self._tickets[:want]
                    if all(ticket.outcome is not None for ticket in head):
                        self._tickets = self._tickets[want:]
                        return Batch([ticket.outcome.group for ticket in head], dropped)
                    await self._changed.wait()
        except TimeoutError:
            waiting = [ticket.prompt.id for ticket in self._tickets[:want] if ticket.outcome is None]
            raise DeadlineError(
                f"{len(waiting)} of {want} groups of this step (first: prompt {waiting[0]})",
                deadline,
                self.config.rollout.generate,
            ) from None

    async def stop(self) -> None:
        """Cancel what is in flight and wait until it has ended; a hook that will not be cancelled is left to itself."""
        tasks = [ticket.task for ticket in self._tickets if ticket.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        self.maker.close()

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: the source's cursor and every ticket that is not trained yet."""
        tickets = [
            SavedTicket(
                number=t.number, prompt=t.prompt, group=t.outcome.group if t.outcome and not t.outcome.reason else None
            )
            for t in self._tickets
        ]
        return {"source": self.source.state(), "next": self._next, "tickets": tickets}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`: complete groups are kept, the others are generated again with the same seeds."""
        self.source.restore(state["source"])
        self._next = state["next"]
        for saved in state["tickets"]:
            ticket = Ticket(saved.number, saved.prompt)
            if saved.group is not None:
                ticket.outcome = Outcome(saved.group)
                self._tickets.append(ticket)
            else:
                self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        ticket.task = asyncio.create_task(self._run(ticket))
        self._tickets.append(ticket)

    async def _run(self, ticket: Ticket) -> None:
        try:
            ticket.outcome = await self.maker.make(ticket.prompt, group_id=f"g{ticket.number}", number=ticket.number)
        except Exception as error:
            # Not a rollout's failure (those are outcomes): a mistake of ours must reach the loop, not vanish in a task.
            self._error = error
        self._changed.set()

    def _drop(self, dropped: Counter[str], failures: list[Outcome]) -> None:
        if self._error is not None:
            raise self._error
        kept = []
        for ticket in self._tickets:
            outcome = ticket.outcome
            if outcome is None or outcome.reason is None:
                kept.append(ticket)
                continue
            dropped[outcome.reason] += 1
            self.on_drop(outcome)
            if outcome.failed:
                failures.append(outcome)
        self._tickets = kept
        limit = self.config.rollout.max_failed_share * self.config.rollout.prompts_per_step
        if len(failures) > limit:
            last = failures[-1]
            raise SlimxError(
                f"{len(failures)} groups of this step failed, more than rollout.max_failed_share="
                f"{self.config.rollout.max_failed_share} of {self.config.rollout.prompts_per_step} allows; "
                f"the last one: {last.reason}: {last.detail}"
            )
