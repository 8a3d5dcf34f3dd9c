"""Starts and stops everything that a command runs on Ray. Stopping is ordered and has a deadline, after any failure.

main thread        start_ray --> event loop: work ......... cleanup --> stop_ray --> the process exits
signals' thread                       | SIGTERM: cancels `work`, starts the watchdog's deadline
an alarm                              | a part that cannot be replaced was lost: does the same
watchdog's thread                     |------- cluster.stop_deadline ------> kills the process if it is still running
pulse's thread                    checks the event loop; kills the process if the loop is blocked
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

import psutil

from slimx.cluster.connection import start_ray, stop_ray
from slimx.cluster.watch import has_ended, local_processes, probes, watch_ray
from slimx.config.schema import Config
from slimx.errors import DeadlineError, Interrupted, Preempted, SlimxError, ending_of, raised
from slimx.orchestration.lifetime.hangs import Pulse, Watchdog, keep_stacks, pulse_deadline
from slimx.orchestration.lifetime.leftovers import watch_over_this_process
from slimx.orchestration.lifetime.signals import Signals
from slimx.runtime.children import bypass_proxies
from slimx.runtime.clocks import RunningClock, RunningLoop
from slimx.runtime.tasks import AnyFuture

SAVING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that announce the loss of the machine or the terminal. After such a signal a run has `checkpoint.grace`
seconds to save."""
START_END_S = 5.0
"""Time in seconds within which the process must exit if a signal arrives while Ray is starting. It is killed after that
time, because Ray's library may ignore signals during startup."""
LINGER_S = 10.0
"""Seconds to wait for the remaining tasks to end when the event loop is closed; tasks that need longer are
abandoned."""


class Alarm:
    """Stops a run with an error if it cannot continue, or asks it to save and stop (SIGUSR1). May be used only in the
    event loop."""

    def __init__(self, ending: Callable[[BaseException | None], None] = lambda error: None) -> None:
        """Creates an alarm. `ending` is called as soon as it is clear how the run ends: with the error, or None."""
        self.ending = ending
        self.leaving = asyncio.Event()
        """Event that is set when the run must save and stop."""
        self.rung: asyncio.Future[SlimxError] = asyncio.get_running_loop().create_future()
        """Future that completes with the error that stops the run."""

        self._watches: set[asyncio.Task[SlimxError]] = set()

    def ring(self, error: SlimxError) -> None:
        """Stops the run with `error`. Later calls have no effect."""
        if not self.rung.done():
            self.rung.set_result(error)

    def ring_after(self, watch: Coroutine[object, None, SlimxError]) -> None:
        """Runs `watch` in the background. Stops the run with the error that `watch` returns, or, if `watch` raises an
        exception, with an error that reports the exception."""

        def ring(watched: asyncio.Task[SlimxError]) -> None:
            if watched.cancelled():
                return
            error = watched.exception()
            if error is None:
                self.ring(watched.result())
            else:  # a bug in a watch must not leave the run unwatched
                self.ring(
                    SlimxError(
                        f"a task that watches the run failed ({raised(error)}), which is a bug in "
                        "slimx; report the bug with this message and the config.yaml of this run",
                        code="watch",
                    )
                )

        # The task runs `watch` directly: a wrapping coroutine that is cancelled before it starts would never await it.
        task = asyncio.create_task(watch)
        task.add_done_callback(ring)
        self._watches.add(task)

    def quiet(self) -> None:
        """Stops all watches, because from now on the parts of the run are expected to exit."""
        for watch in self._watches:
            watch.cancel()


async def _nothing(error: BaseException) -> None: ...


class EndingStack(AsyncExitStack):
    """An exit stack that first stops the alarm's watches: closing one part of the run makes other parts exit, which
    must not be reported as failures. Then the stack reports how the run ends, so that the deadline for stopping starts
    before any part is closed."""

    def __init__(self, alarm: Alarm, failing: Callable[[BaseException], Awaitable[None]] = _nothing):
        """Creates the stack. If the run ends with an error, `failing` is called with the error while all parts are
        still running."""
        super().__init__()
        self._alarm = alarm
        self._failing = failing

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._alarm.quiet()
        if not isinstance(error, asyncio.CancelledError):  # `interruptible` reports cancellations
            self._alarm.ending(error)
        reason = self._alarm.rung.result() if self._alarm.rung.done() else error
        if reason is not None:
            await self._failing(reason)
        return bool(await super().__aexit__(kind, error, trace))


Work = Callable[[Alarm], Coroutine[object, None, None]]
"""Main coroutine function of a command, which runs in the event loop once Ray has started."""


def run_with_ray(config: Config, device: str, work: Work, *, trainers: bool = True) -> None:
    """Starts Ray for `device`, runs `work` in an event loop, and stops everything. `trainers`: False for a command
    without trainer ranks.

    Raises the error of `work`, or Interrupted after SIGINT, SIGTERM or SIGHUP. If stopping takes longer than
    `cluster.stop_deadline`, the watchdog kills the process."""
    bypass_proxies(os.environ)
    watch_over_this_process()
    with Watchdog() as watchdog, Signals() as signals:
        seconds = config.cluster.stop_deadline
        grace = config.checkpoint.grace or 0.0
        starting = True

        def bound(signum: int) -> None:
            if signum == signal.SIGUSR1:
                return
            deadline = seconds + grace if signum in SAVING else seconds
            if starting:  # nothing to stop yet, and Ray's processes exit with this one
                deadline = START_END_S
            watchdog.arm(deadline, *ending_of(Interrupted(signum)))

        def ending(error: BaseException | None) -> None:
            watchdog.arm(seconds, *ending_of(error))

        signals.subscribe(bound)
        try:
            start_ray(config, device, trainers=trainers)
            signals.install()  # again, because Ray has installed its own handlers
            starting = False
            if signals.received:
                raise Interrupted(signals.received[0])
            processes = local_processes()
            try:
                run_loop(interruptible(_watching(processes, config, work, watchdog), signals, ending, grace))
            except (Interrupted, Preempted):
                raise
            except Exception as error:
                # If a process of Ray has died, that is the cause of every other error.
                lost = has_ended(processes)
                if lost is None:
                    raise
                raise lost from error
        except SystemExit:  # raised by Ray's signal handler while Ray starts
            if not signals.received:
                raise
            raise Interrupted(signals.received[0]) from None
        finally:
            ending(sys.exc_info()[1])
            stop_ray()


def _watching(processes: Mapping[str, psutil.Process], config: Config, work: Work, watchdog: Watchdog) -> Work:
    """Wraps `work` with two watches: `work` is stopped when one of Ray's `processes` is lost, and `watchdog` kills this
    process when the event loop is blocked."""

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
    """Runs `work` until it returns. On SIGINT, SIGTERM, SIGHUP or the work's alarm, cancels `work` and waits for its
    cleanup. On SIGUSR1, sets the alarm's `leaving`, which asks the run to save and stop.

    If `grace` is set, the first SIGTERM or SIGHUP sets `leaving` and cancels `work` only `grace` seconds later.
    `ending` is called as soon as it is clear how the run ends."""
    loop = asyncio.get_running_loop()
    alarm = Alarm(ending)
    task = asyncio.ensure_future(work(alarm))
    stopped = asyncio.Event()

    def heard(signum: int) -> None:
        # A second signal changes nothing: stopping has its own deadlines.
        with suppress(RuntimeError):  # the loop is closed
            if signum == signal.SIGUSR1:
                loop.call_soon_threadsafe(alarm.leaving.set)
            elif grace and len(signals.received) == 1 and signum in SAVING:
                loop.call_soon_threadsafe(alarm.leaving.set)
                loop.call_soon_threadsafe(loop.call_later, grace, stopped.set)
            else:
                loop.call_soon_threadsafe(stopped.set)

    signals.subscribe(heard)
    stop_requested = asyncio.ensure_future(stopped.wait())
    futures: list[AnyFuture] = [task, stop_requested, alarm.rung]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            if alarm.rung.done():
                ending(alarm.rung.result())
            task.cancel()
            await asyncio.wait({task})
            if alarm.rung.done() and not stop_requested.done():
                raise alarm.rung.result()
        await task
    except asyncio.CancelledError:
        if signals.received:
            raise Interrupted(signals.received[0]) from None
        raise
    finally:
        stop_requested.cancel()


def run_loop(main: Coroutine[object, None, None]) -> None:
    """Runs `main` like `asyncio.run`, with two differences. Deadlines of the loop pause while the process is stopped
    (SIGSTOP). At the end, tasks that resist cancellation and threads of hooks that do not return are abandoned."""
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
                    # The loop re-raises these errors from any task or callback, such as a hook's; the task keeps them.
                    if task.done():
                        raise
        finally:
            loop.run_until_complete(_end(asyncio.all_tasks(loop)))
    finally:
        asyncio.set_event_loop(None)
        loop.close()  # does not wait for the threads of its executor


async def _end(tasks: Iterable[asyncio.Task[object]]) -> None:
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
    """Returns a callback that awaits `stop`, for use in an exit stack. If `stop` fails after another error, the failure
    is only passed to `note`, so that the earlier error is raised."""

    async def close(kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            await stop()
        except SlimxError as problem:
            if error is None:
                raise
            note(f"while stopping: {problem}")

    return close


async def together(starting: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Runs all coroutine functions in `starting` concurrently and waits for them. If one fails, cancels the rest and
    raises the failure."""
    tasks = [asyncio.ensure_future(work()) for work in starting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
