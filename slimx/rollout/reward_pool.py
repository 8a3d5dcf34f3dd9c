"""Runs reward hooks in threads of their own, so that one that hangs or blocks cannot stop the others or the run.

A Python thread cannot be ended. A call that outlives its deadline is abandoned: its thread is left to itself (a daemon,
gone with the process) and a fresh one takes its place. `slimx.rollout.reward_processes` ends such calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from slimx.data.records import Group, Trajectory
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout.hooks import Reward, RewardContext, name_of

Verdict = tuple[float, dict[str, float]]
"""A reward and its parts."""


class RewardPool:
    """`workers` daemon threads, each with one event loop for its calls (making one costs more than most rewards)."""

    def __init__(self, reward: Reward, *, workers: int, deadline_s: float):
        self.reward, self.deadline_s = reward, deadline_s
        self.abandoned = 0
        """Calls given up at their deadline."""
        self._workers, self._closed = 0, False
        self._calls: queue.SimpleQueue[Callable[[asyncio.Runner], bool] | None] = queue.SimpleQueue()
        """Each call answers whether its worker has been replaced meanwhile; None ends a worker."""
        for _ in range(workers):
            self._start_worker()

    async def judge(self, ctx: RewardContext, judged: Trajectory | Group) -> Verdict | list[Verdict]:
        """Of a trajectory, or a list with that of each one of a group.

        SlimxError for what the hook raised, returned wrongly or not in time, and after `close`."""
        if self._closed:
            raise SlimxError(f"the reward of {named(judged)} was asked for after its workers were told to end")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        started, abandoned, replaced = asyncio.Event(), threading.Event(), threading.Event()

        def work(runner: asyncio.Runner) -> bool:
            if abandoned.is_set():
                return False
            tell(started.set)
            try:
                value, error = runner.run(self.reward(ctx, judged)), None
            except BaseException as caught:
                value, error = None, caught
            tell(_settle, result, value, error)
            return replaced.is_set()

        def tell(function: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the run, and its event loop, may have ended meanwhile
                loop.call_soon_threadsafe(function, *arguments)

        self._calls.put(work)
        try:
            await started.wait()
            await asyncio.wait({result}, timeout=self.deadline_s)
        finally:
            if not result.done():
                abandoned.set()
                if started.is_set():
                    self.abandoned += 1
                    replaced.set()
                    self._start_worker()
        if not result.done():
            raise DeadlineError(f"the reward of {named(judged)}", self.deadline_s, name_of(self.reward))
        if (error := result.exception()) is not None:
            raise SlimxError(f"reward hook {name_of(self.reward)} raised {type(error).__name__}: {error}") from error
        return verdicts(result.result(), judged, name_of(self.reward))

    def close(self) -> None:
        """Let the workers end once they are idle."""
        self._closed = True
        for _ in range(self._workers):
            self._calls.put(None)

    def _start_worker(self) -> None:
        self._workers += 1
        threading.Thread(target=self._work, name="slimx-reward", daemon=True).start()

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                if call(runner):
                    return


def _settle(result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def named(judged: Trajectory | Group) -> str:
    """What is judged, as an error names it."""
    return f"{'group' if isinstance(judged, Group) else 'trajectory'} {judged.id}"


def verdicts(value: Any, judged: Trajectory | Group, name: str) -> Verdict | list[Verdict]:
    """What hook `name` returned of a trajectory, or of each one of a group."""
    if not isinstance(judged, Group):
        return checked(value, name)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(judged.trajectories):
        raise SlimxError(
            f"reward hook {name} returned {value!r} for a group of {len(judged.trajectories)}; return a list with the "
            "reward of each trajectory (reward.scope is group)"
        )
    return [checked(each, name) for each in value]


def checked(value: Any, name: str) -> Verdict:
    """A finite number, or a dict of finite numbers whose sum is the reward."""
    parts = value if isinstance(value, dict) else {"reward": value}
    for key, part in parts.items():
        if isinstance(part, bool) or not isinstance(part, numbers.Real) or not math.isfinite(part):
            raise SlimxError(
                f"reward hook {name} returned {part!r} for {key!r}; return a finite number or a dict of them"
            )
    if not parts:
        raise SlimxError(f"reward hook {name} returned an empty dict; return a finite number or a dict of them")
    floats = {key: float(part) for key, part in parts.items()}
    return sum(floats.values()), floats if isinstance(value, dict) else {}
