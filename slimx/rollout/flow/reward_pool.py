"""Runs reward hooks in threads of their own, so that one that hangs or blocks cannot stop the others or the run.

A Python thread cannot be ended. A call that outlives its deadline is abandoned: its thread is left to itself (a daemon,
gone with the process) and a fresh one takes its place. `slimx.rollout.flow.reward_processes` ends such calls.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimx.data.records import Group, Trajectory
from slimx.errors import DeadlineError, SlimxError, raised, safe_repr
from slimx.rollout.hook_loading import described, name_of
from slimx.rollout.hooks import Reward, RewardContext

Verdict = tuple[float, dict[str, float]]
"""A reward and its parts."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the hook."""

    ctx: RewardContext
    judged: Trajectory | Group
    result: asyncio.Future[tuple[Any, BaseException | None]]
    """The hook's result, or what it raised."""
    began: float = 0.0
    """Moment at which a worker took the call, in seconds of the clock of the loop that asked."""
    given_up: bool = False


class RewardPool:
    """`workers` daemon threads, each with one event loop for its calls (making one costs more than most rewards).

        judge -> queue -> a worker runs the hook -> answers -> _deliver, once for all that have come -> judge goes on

    Most rewards take a few microseconds, and so does waking a thread: the driver's loop is not told when a call begins,
    and one timer watches the deadlines of all calls. A pool belongs to one event loop at a time."""

    def __init__(self, reward: Reward, *, workers: int, deadline_s: float):
        self.reward, self.deadline_s = reward, deadline_s
        self.abandoned = 0
        """Calls given up while they ran."""
        self._workers, self._closed = 0, False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """None ends a worker."""
        self._lock = threading.Lock()
        """Guards `_running`, and whether a call is given up before a worker takes it."""
        self._running: set[_Call] = set()
        self._answers: deque[tuple[_Call, Any, BaseException | None]] = deque()
        self._told = False
        """True if the loop will look at `_answers`."""
        self._waiting = 0
        """Calls that `judge` waits for."""
        self._watch: asyncio.TimerHandle | None = None
        """Looks at the deadlines while there are any."""
        for _ in range(workers):
            self._start_worker()

    async def judge(self, ctx: RewardContext, judged: Trajectory | Group) -> Verdict | list[Verdict]:
        """The verdict on a trajectory, or a list with that on each one of a group.

        SlimxError for what the hook raised, returned wrongly or not in time, and after `close`."""
        if self._closed:
            raise SlimxError(
                f"the reward of {named(judged)} was asked for after its workers were told to end",
                code="reward.ended",
                about=named(judged),
            )
        loop = asyncio.get_running_loop()
        call = _Call(ctx, judged, loop.create_future())
        self._waiting += 1
        if self._watch is None:
            self._watch = loop.call_later(self.deadline_s, self._look)
        self._calls.put(call)
        try:
            value, error = await call.result
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        finally:
            self._waiting -= 1
            if not self._waiting and self._watch is not None:
                self._watch.cancel()
                self._watch = None
        if error is not None:
            raise SlimxError(
                f"reward hook {name_of(self.reward)} raised {raised(error)}",
                code="reward.raised",
                about=name_of(self.reward),
            ) from error
        return verdicts(value, judged, self.reward)

    def close(self) -> None:
        """Let the workers end once they are idle."""
        self._closed = True
        for _ in range(self._workers):
            self._calls.put(None)

    # In the event loop ------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        self._told = False  # before the look: what is appended from here on is announced again
        while self._answers:
            call, value, error = self._answers.popleft()
            if not call.result.done():
                call.result.set_result((value, error))

    def _look(self) -> None:
        """Give up the calls that are late, and look again when the next one may be: a queued call has begun at no
        earlier time than now."""
        now = asyncio.get_running_loop().time()
        with self._lock:
            running = list(self._running)
        for call in running:
            if now - call.began >= self.deadline_s and not call.result.done() and self._give_up(call):
                call.result.set_exception(
                    DeadlineError(f"the reward of {named(call.judged)}", self.deadline_s, name_of(self.reward))
                )
        first = min((call.began for call in running if not call.given_up), default=now)
        self._watch = asyncio.get_running_loop().call_later(max(0.0, first + self.deadline_s - now), self._look)

    def _give_up(self, call: _Call) -> bool:
        """Forget `call`; whether it ran, and so took its worker along."""
        with self._lock:
            call.given_up = True
            ran = call in self._running
            self._running.discard(call)
        if ran:
            self.abandoned += 1
            self._start_worker()
        return ran

    def _start_worker(self) -> None:
        self._workers += 1
        threading.Thread(target=self._work, name="slimx-reward", daemon=True).start()

    # In a worker's thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                with self._lock:
                    if call.given_up:
                        continue
                    call.began = call.result.get_loop().time()
                    self._running.add(call)
                try:
                    value, error = runner.run(self.reward(call.ctx, call.judged)), None
                except BaseException as caught:
                    value, error = None, caught
                with self._lock:
                    if call.given_up:  # another worker has taken this one's place
                        return
                    self._running.discard(call)
                self._answers.append((call, value, error))
                if not self._told:
                    self._told = True
                    try:
                        call.result.get_loop().call_soon_threadsafe(self._deliver)
                    except RuntimeError:  # the run, and its event loop, have ended meanwhile
                        self._told = False


def named(judged: Trajectory | Group) -> str:
    """The name of what is judged, for errors."""
    return f"{'group' if isinstance(judged, Group) else 'trajectory'} {judged.id}"


def verdicts(value: Any, judged: Trajectory | Group, hook: Reward) -> Verdict | list[Verdict]:
    """The verdicts that `hook` returned of a trajectory, or of each one of a group."""
    if not isinstance(judged, Group):
        return checked(value, hook)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(judged.trajectories):
        raise SlimxError(
            f"reward hook {described(hook)} returned {safe_repr(value)} for a group of {len(judged.trajectories)}; "
            "return a list with the reward of each trajectory (reward.scope is group)",
            code="reward.returned",
            about=name_of(hook),
        )
    return [checked(each, hook) for each in value]


def checked(value: Any, hook: Reward) -> Verdict:
    """A finite number, or a dict of finite numbers whose sum, the reward, is finite too."""
    parts = value if isinstance(value, dict) else {"reward": value}
    floats = {key: _finite(key, part, value, hook) for key, part in parts.items()}
    if not floats or not math.isfinite(sum(floats.values())):
        shown = "an empty dict" if not floats else f"{safe_repr(value)}, whose sum is not finite"
        raise SlimxError(
            f"reward hook {described(hook)} returned {shown}; return a finite number or a dict of them",
            code="reward.returned",
            about=name_of(hook),
        )
    return sum(floats.values()), floats if isinstance(value, dict) else {}


def _finite(key: Any, part: Any, value: Any, hook: Reward) -> float:
    """One part of a reward as a float."""
    try:
        if isinstance(key, str) and key.isprintable() and isinstance(part, numbers.Real) and not isinstance(part, bool):
            number = float(part)
            if math.isfinite(number):
                return number
    except Exception:  # of a number of a user's own kind, or one beyond a float: refused below
        pass
    shown = f"{safe_repr(part)} for {safe_repr(key)}" if isinstance(value, dict) else safe_repr(part)
    raise SlimxError(
        f"reward hook {described(hook)} returned {shown}; return a finite number or a dict of them",
        code="reward.returned",
        about=key if isinstance(key, str) else safe_repr(key),
    )
