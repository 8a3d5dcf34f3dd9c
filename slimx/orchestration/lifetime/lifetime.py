"""Runs and ends the parts that a command starts: in order, whatever happens, and in bounded time.

main thread        start_ray --> event loop: work ........ clean-up --> stop_ray --> the process ends
signals' thread                       | SIGTERM: cancels `work`, arms the watchdog
an alarm                              | a part that cannot be replaced was lost: likewise
watchdog's thread                     |------- cluster.stop_deadline ------> ends the process if it is still there
pulse's thread                    looks at the event loop; ends the process if that stands still
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from slimx.cluster.connection import start_ray, stop_ray
from slimx.cluster.watch import has_ended, local_processes, probes, watch_ray
from slimx.config.schema import Config
from slimx.errors import DeadlineError, Interrupted, Preempted, SlimxError, ending_of
from slimx.orchestration.lifetime.hangs import Pulse, Watchdog, keep_stacks, pulse_deadline
from slimx.orchestration.lifetime.remains import watch_over_this_process
from slimx.orchestration.lifetime.signals import Signals
from slimx.runtime.children import bypass_proxies
from slimx.runtime.clocks import RunningClock, RunningLoop

SAVING = (signal.SIGTERM, signal.SIGHUP)
"""Signals by which a machine or terminal is taken away, for which `checkpoint.grace` is."""
START_END_S = 5.0
"""Seconds that a process whose Ray is still starting gets to end after a signal: Ray's library may hear none."""
LINGER_S = 10.0
"""Seconds that tasks get to end when nothing waits for them any more."""


class Alarm:
    """An alarm for whoever finds that the run cannot go on; SIGUSR1 asks it to leave. Belongs to the event loop."""

    def __init__(self, ending: Callable[[BaseException | None], None] = lambda error: None) -> None:
        """`ending` is told as soon as it is known how the run ends."""
        self.ending = ending
        self.leaving = asyncio.Event()
        """Set when the run shall save and end."""
        self.rung: asyncio.Future[SlimxError] = asyncio.get_running_loop().create_future()

        self._watches: set[asyncio.Task[SlimxError]] = set()

    def ring(self, error: SlimxError) -> None:
        """End the run because of `error`; the first one counts."""
        if not self.rung.done():
            self.rung.set_result(error)

    def ring_after(self, watch: Coroutine[Any, Any, SlimxError]) -> None:
        """End the run with what `watch` returns, when it does."""

        def ring(watched: asyncio.Task[SlimxError]) -> None:
            if watched.cancelled():
                return
            if (error := watched.exception()) is None:
                self.ring(watched.result())
            else:  # a mistake of ours must not leave a run unwatched
                self.ring(SlimxError(f"a watch of the run failed: {type(error).__name__}: {error}", code="watch"))

        # `watch` itself is the task: a coroutine around it that is cancelled before it begins would never await it.
        task = asyncio.create_task(watch)
        task.add_done_callback(ring)
        self._watches.add(task)

    def quiet(self) -> None:
        """End all watches: what ends now ends because it shall."""
        for watch in self._watches:
            watch.cancel()


async def _nothing(error: BaseException) -> None: ...


class EndingStack(AsyncExitStack):
    """An exit stack that tells the alarm first: what it closes may hang, and closes what is watched."""

    def __init__(self, alarm: Alarm, failing: Callable[[BaseException], Awaitable[None]] = _nothing):
        """`failing` is shown why the run ends while all parts are still there."""
        super().__init__()
        self._alarm, self._failing = alarm, failing

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._alarm.quiet()
        if not isinstance(error, asyncio.CancelledError):  # whoever cancels knows why
            self._alarm.ending(error)
        reason = self._alarm.rung.result() if self._alarm.rung.done() else error
        if reason is not None:
            await self._failing(reason)
        return await super().__aexit__(kind, error, trace)


Work = Callable[[Alarm], Coroutine[Any, Any, None]]


def run_with_ray(config: Config, device: str, work: Work, *, trainers: bool = True) -> None:
    """Start Ray, run `work` in an event loop, end everything.

    Raises what `work` raises, Interrupted after SIGINT or SIGTERM. If the end takes longer than
    `cluster.stop_deadline`, the process ends without it."""
    bypass_proxies(os.environ)
    watch_over_this_process()
    with Watchdog() as watchdog, Signals() as signals:
        seconds, grace = config.cluster.stop_deadline, config.checkpoint.grace or 0.0

        starting = True

        def bound(signum: int) -> None:
            if signum == signal.SIGUSR1:
                return
            if starting:  # nothing of the run is there, and what Ray has started ends with this process
                watchdog.arm(START_END_S, *ending_of(Interrupted(signum)))
            else:
                watchdog.arm(seconds + grace * (signum in SAVING), *ending_of(Interrupted(signum)))

        def ending(error: BaseException | None) -> None:
            watchdog.arm(seconds, *ending_of(error))

        signals.subscribe(bound)
        try:
            start_ray(config, device, trainers=trainers)
            signals.install()  # Ray has put its own handlers there
            starting = False
            if signals.received:
                raise Interrupted(signals.received[0])
            processes = local_processes()
            try:
                run_loop(interruptible(_watching(processes, config, work, watchdog), signals, ending, grace))
            except (Interrupted, Preempted):
                raise
            except Exception as error:
                # Whatever was missed first, and whoever said so: it is lost with Ray if Ray is.
                if (lost := has_ended(processes)) is None:
                    raise
                raise lost from error
        except SystemExit:  # how Ray's handler answers a signal while it starts
            if not signals.received:
                raise
            raise Interrupted(signals.received[0]) from None
        finally:
            ending(sys.exc_info()[1])
            stop_ray()


def _watching(processes: Mapping[str, psutil.Process], config: Config, work: Work, watchdog: Watchdog) -> Work:
    """`work`, which ends when Ray is lost, and with the process when the event loop stands still."""

    def strike(error: DeadlineError) -> None:
        asyncio.run(keep_stacks(Path(config.run.dir), partial(print, file=sys.stderr), error))
        watchdog.arm(0.0, *ending_of(error))

    async def watched(alarm: Alarm) -> None:
        alarm.ring_after(watch_ray(processes, probes(), config.cluster.ray_deadline))
        with Pulse(pulse_deadline(config), strike, asyncio.get_running_loop().time):
            await work(alarm)

    return watched


async def interruptible(
    work: Work, signals: Signals, ending: Callable[[BaseException | None], None], grace: float = 0.0
) -> None:
    """Run `work`; SIGINT and SIGTERM cancel it, and so does its alarm; its clean-up is waited for. SIGUSR1 asks it to
    leave, and so does the first SIGTERM, which cancels it `grace` seconds later. `ending` is told as soon as it is
    known how the run ends."""
    loop, alarm = asyncio.get_running_loop(), Alarm(ending)
    task, stopped = asyncio.ensure_future(work(alarm)), asyncio.Event()

    def heard(signum: int) -> None:
        # A second signal while everything is being stopped changes nothing: the stop has its own deadlines.
        with suppress(RuntimeError):  # the loop has closed
            if signum == signal.SIGUSR1:
                loop.call_soon_threadsafe(alarm.leaving.set)
            elif grace and len(signals.received) == 1 and signum in SAVING:
                loop.call_soon_threadsafe(alarm.leaving.set)
                loop.call_soon_threadsafe(loop.call_later, grace, stopped.set)
            else:
                loop.call_soon_threadsafe(stopped.set)

    signals.subscribe(heard)
    asked = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({task, asked, alarm.rung}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            if alarm.rung.done():
                ending(alarm.rung.result())
            task.cancel()
            await asyncio.wait({task})
            if alarm.rung.done() and not asked.done():
                raise alarm.rung.result()
        await task
    except asyncio.CancelledError:
        if signals.received:
            raise Interrupted(signals.received[0]) from None
        raise
    finally:
        asked.cancel()


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on a loop whose deadlines stand still while the process does, and which waits for nobody for ever:
    tasks that will not be cancelled and threads of hooks that do not return are left to themselves."""
    clock = RunningClock()
    clock.keep()
    loop = RunningLoop(clock)
    try:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main)
        try:
            while True:
                try:
                    loop.run_until_complete(task)
                    break
                except (SystemExit, KeyboardInterrupt):
                    # The loop passes these on from any task or callback, of a hook say, whose error it stays.
                    if task.done():
                        raise
        finally:
            loop.run_until_complete(_end(asyncio.all_tasks(loop)))
    finally:
        asyncio.set_event_loop(None)
        loop.close()  # which does not wait for the threads of its executor


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    left = set(tasks) - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=LINGER_S)
    try:
        async with asyncio.timeout(LINGER_S):
            await asyncio.get_running_loop().shutdown_asyncgens()
    except TimeoutError:
        return


def stopping(stop: Callable[[], Awaitable[None]], note: Callable[[str], None]) -> Callable[..., Awaitable[None]]:
    """An exit callback for `stop`, whose own failure must not hide the error that ended the run."""

    async def close(kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            await stop()
        except SlimxError as problem:
            if error is None:
                raise
            note(f"while stopping: {problem}")

    return close


async def together(starting: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Begin all and wait for them; the first failure ends the wait and cancels the rest."""
    tasks = [asyncio.ensure_future(work()) for work in starting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
