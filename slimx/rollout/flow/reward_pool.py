"""Runs reward hooks in threads, so that a hook that hangs or blocks stops neither the other calls nor the run.

A Python thread cannot be killed. A call that exceeds its deadline is abandoned: its daemon thread keeps running, and a
new thread replaces it in the pool. `slimx.rollout.flow.reward_processes` runs hooks in processes, which can be killed.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsFloat

from slimx.data.records import Group, Trajectory
from slimx.errors import DeadlineError, SlimxError, raised, safe_repr
from slimx.rollout.hook_loading import name_of, name_with_source
from slimx.rollout.hooks import Reward, RewardContext

Verdict = tuple[float, dict[str, float]]
"""A reward, with the parts that add up to it, by name; there are no parts if the hook returned a single number."""


class _Outcome(NamedTuple):
    value: object
    error: BaseException | None


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the reward hook: its arguments, its state and the future for its result."""

    ctx: RewardContext
    judged: Trajectory | Group
    result: asyncio.Future[_Outcome]
    """Future that receives the hook's return value or exception."""
    began: float = 0.0
    """Time at which a worker took the call, by the clock of the calling event loop."""
    abandoned: bool = False


class RewardPool:
    """Pool of daemon threads that run calls of a reward hook.

        judge -> queue -> a worker runs the hook -> results -> _deliver, once for all results -> judge returns

    Each thread has one event loop for all its calls, because creating a loop costs more than most rewards. Most rewards
    take a few microseconds, and so does waking a thread: the driver's loop is therefore not notified when a call
    starts, and a single timer checks the deadlines of all calls. A pool can be used by one event loop at a time.
    """

    def __init__(self, reward: Reward, *, workers: int, deadline_s: float):
        self.reward = reward
        self.deadline_s = deadline_s
        self.abandoned = 0
        """Number of calls that were abandoned while they ran."""
        self._workers = 0
        self._closed = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """Calls that wait for a worker; None makes one worker exit."""
        self._lock = threading.Lock()
        """Guards `_running`, and the decision whether a call is abandoned before a worker takes it."""
        self._running: set[_Call] = set()
        self._results: deque[tuple[_Call, _Outcome]] = deque()
        self._notified = False
        """True if the event loop has been notified and will read `_results`."""
        self._waiting = 0
        """Number of pending calls of `judge`."""
        self._watch: asyncio.TimerHandle | None = None
        """Timer of the next deadline check; None if no call is pending."""
        for _ in range(workers):
            self._start_worker()

    async def judge(self, ctx: RewardContext, judged: Trajectory | Group) -> Verdict | list[Verdict]:
        """Runs the hook on a trajectory and returns its reward, or on a group and returns a list with each trajectory's
        reward.

        Raises SlimxError if the hook raises or returns an invalid value, or if the pool has been closed, and
        DeadlineError if the hook takes longer than `deadline_s`.
        """
        if self._closed:
            raise SlimxError(
                f"the reward of {named(judged)} was requested after the reward workers were stopped; await the reward "
                "before the run ends",
                code="reward.ended",
                about=named(judged),
            )
        loop = asyncio.get_running_loop()
        call = _Call(ctx, judged, loop.create_future())
        self._waiting += 1
        if self._watch is None:
            self._watch = loop.call_later(self.deadline_s, self._check_deadlines)
        self._calls.put(call)
        try:
            value, error = await call.result
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        finally:
            self._waiting -= 1
            if not self._waiting and self._watch is not None:
                self._watch.cancel()
                self._watch = None
        if error is not None:
            name = name_of(self.reward)
            sentence = f"{name} raised {raised(error)}; fix this error in the hook"
            if isinstance(error, SlimxError):  # of the adapter that calls the hook; it has a remedy
                sentence = f"{name}: {error}"
            raise SlimxError(f"reward hook {sentence}", code="reward.raised", about=name) from error
        return verdicts(value, judged, self.reward)

    def close(self) -> None:
        """Makes the workers exit once they are idle."""
        self._closed = True
        for _ in range(self._workers):
            self._calls.put(None)

    # In the event loop ------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        self._notified = False  # reset before reading, so that a later result notifies again
        while self._results:
            call, outcome = self._results.popleft()
            if not call.result.done():
                call.result.set_result(outcome)

    def _check_deadlines(self) -> None:
        """Abandons late calls and schedules the next check at the earliest deadline.

        A call that is still queued starts now at the earliest, so its deadline is at least `deadline_s` from now.
        """
        now = asyncio.get_running_loop().time()
        with self._lock:
            running = list(self._running)
        for call in running:
            if now - call.began >= self.deadline_s and not call.result.done() and self._abandon(call):
                call.result.set_exception(
                    DeadlineError(f"the reward of {named(call.judged)}", self.deadline_s, name_of(self.reward))
                )
        first = min([call.began for call in running if not call.abandoned], default=now)
        delay = max(0.0, first + self.deadline_s - now)
        self._watch = asyncio.get_running_loop().call_later(delay, self._check_deadlines)

    def _abandon(self, call: _Call) -> bool:
        """Abandons `call`. Returns True if it was running; a new worker then replaces the worker that runs it."""
        with self._lock:
            call.abandoned = True
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
                    if call.abandoned:
                        continue
                    call.began = call.result.get_loop().time()
                    self._running.add(call)
                try:
                    outcome = _Outcome(runner.run(self.reward(call.ctx, call.judged)), None)
                except BaseException as error:
                    outcome = _Outcome(None, error)
                with self._lock:
                    if call.abandoned:  # another worker has taken over
                        return
                    self._running.discard(call)
                self._results.append((call, outcome))
                if not self._notified:
                    self._notified = True
                    try:
                        call.result.get_loop().call_soon_threadsafe(self._deliver)
                    except RuntimeError:  # the run and its event loop have ended
                        self._notified = False


def named(judged: Trajectory | Group) -> str:
    """Returns the kind and the id of a trajectory or group, for error messages."""
    return f"{'group' if isinstance(judged, Group) else 'trajectory'} {judged.id}"


def verdicts(value: object, judged: Trajectory | Group, hook: Reward) -> Verdict | list[Verdict]:
    """Checks the return value of `hook`. Returns the reward if `judged` is a trajectory, or a list with each
    trajectory's reward if it is a group."""
    if not isinstance(judged, Group):
        return checked(value, hook)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(judged.trajectories):
        raise SlimxError(
            f"reward hook {name_with_source(hook)} returned {safe_repr(value)} for a group of "
            f"{len(judged.trajectories)} trajectories; return a list with one reward per trajectory, "
            "because reward.scope is group",
            code="reward.returned",
            about=name_of(hook),
        )
    return [checked(item, hook) for item in value]


def checked(value: object, hook: Reward) -> Verdict:
    """Checks a reward that `hook` returned, which must be a finite number, or a dict of finite numbers whose sum is
    finite.

    Returns the reward, which is the sum if the hook returned a dict, and its parts by name. Raises SlimxError for any
    other value.
    """
    parts = value if isinstance(value, dict) else {"reward": value}
    floats = {key: _finite(key, part, value, hook) for key, part in parts.items()}
    if not floats or not math.isfinite(sum(floats.values())):
        shown = "an empty dict" if not floats else f"{safe_repr(value)}, whose sum is not finite"
        raise SlimxError(
            f"reward hook {name_with_source(hook)} returned {shown}; return a finite number, or a nonempty dict of "
            "numbers with a finite sum",
            code="reward.returned",
            about=name_of(hook),
        )
    return sum(floats.values()), floats if isinstance(value, dict) else {}


def _finite(key: object, part: object, value: object, hook: Reward) -> float:
    """Returns `part`, one number of the reward `value`, as a float.

    Raises SlimxError if it is not a finite number, or its name `key` is not printable.
    """
    try:
        if isinstance(key, str) and key.isprintable() and isinstance(part, SupportsFloat):
            number = float(part)
            if math.isfinite(number):
                return number
    except Exception:  # raised by a user's number type, or by an integer too large for a float
        pass
    shown = f"{safe_repr(part)} for key {safe_repr(key)}" if isinstance(value, dict) else safe_repr(part)
    raise SlimxError(
        f"reward hook {name_with_source(hook)} returned {shown}; return a finite number or a dict of finite numbers",
        code="reward.returned",
        about=key if isinstance(key, str) else safe_repr(key),
    )
