"""Runs and ends the parts that a command starts: in order, in bounded time, after any failure.

main thread        start_ray --> event loop: work ........ clean-up --> stop_ray --> the process exits
signals' thread                       | SIGTERM: cancels `work`, arms the watchdog
an alarm                              | a part that cannot be replaced was lost: the same
watchdog's thread                     |------- cluster.stop_deadline ------> kills the process if it is still running
pulse's thread                    checks the event loop; ends the process if it is blocked
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
from slimx.errors import DeadlineError, Interrupted, Preempted, SlimxError, ending_of
from slimx.orchestration.lifetime.hangs import Pulse, Watchdog, keep_stacks, pulse_deadline
from slimx.orchestration.lifetime.leftovers import watch_over_this_process
from slimx.orchestration.lifetime.signals import Signals
from slimx.runtime.children import bypass_proxies
from slimx.runtime.clocks import RunningClock, RunningLoop
from slimx.runtime.tasks import AnyFuture

SAVING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that announce the loss of a machine or terminal; `checkpoint.grace` applies to them."""
START_END_S = 5.0
"""Deadline after a signal for a process whose Ray is still starting, in seconds: Ray's library may ignore signals."""
LINGER_S = 10.0
"""Deadline for tasks to end when nothing waits for them any more, in seconds."""


class Alarm:
    """Ends a run that cannot go on, and asks it to leave on SIGUSR1. Belongs to the event loop."""

    def __init__(self, ending: Callable[[BaseException | None], None] = lambda error: None) -> None:
        """Creates an alarm; `ending` is called as soon as it is known how the run ends."""
        self.ending = ending
        self.leaving = asyncio.Event()
        """Set when the run must save and end."""
        self.rung: asyncio.Future[SlimxError] = asyncio.get_running_loop().create_future()
        """Error that ends the run."""

        self._watches: set[asyncio.Task[SlimxError]] = set()

    def ring(self, error: SlimxError) -> None:
        """Ends the run with `error`; only the first call counts."""
        if not self.rung.done():
            self.rung.set_result(error)

    def ring_after(self, watch: Coroutine[object, None, SlimxError]) -> None:
        """Ends the run with the error that `watch` returns, once it does."""

        def ring(watched: asyncio.Task[SlimxError]) -> None:
            if watched.cancelled():
                return
            error = watched.exception()
            if error is None:
                self.ring(watched.result())
            else:  # a bug in a watch must not leave a run unwatched
                self.ring(SlimxError(f"a watch of the run failed: {type(error).__name__}: {error}", code="watch"))

        # `watch` is the task itself: a coroutine around it would never await it if cancelled before it begins.
        task = asyncio.create_task(watch)
        task.add_done_callback(ring)
        self._watches.add(task)

    def quiet(self) -> None:
        """Stops all watches: exits are expected from here on."""
        for watch in self._watches:
            watch.cancel()


async def _nothing(error: BaseException) -> None: ...


class EndingStack(AsyncExitStack):
    """An exit stack that notifies the alarm first: closing a part may hang, and ends parts that are watched."""

    def __init__(self, alarm: Alarm, failing: Callable[[BaseException], Awaitable[None]] = _nothing):
        """Creates the stack; `failing` is called with the reason of the end while all parts are still running."""
        super().__init__()
        self._alarm = alarm
        self._failing = failing

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._alarm.quiet()
        if not isinstance(error, asyncio.CancelledError):  # after a cancellation, `interruptible` reports the reason
            self._alarm.ending(error)
        reason = self._alarm.rung.result() if self._alarm.rung.done() else error
        if reason is not None:
            await self._failing(reason)
        return bool(await super().__aexit__(kind, error, trace))


Work = Callable[[Alarm], Coroutine[object, None, None]]
"""Work of a command in the event loop."""


def run_with_ray(config: Config, device: str, work: Work, *, trainers: bool = True) -> None:
    """Starts Ray, runs `work` in an event loop, ends everything.

    Raises the error of `work`, or Interrupted after SIGINT or SIGTERM. If the end takes longer than
    `cluster.stop_deadline`, the watchdog ends the process."""
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
            if starting:  # no part of the run exists yet, and Ray's processes end with this one
                deadline = START_END_S
            watchdog.arm(deadline, *ending_of(Interrupted(signum)))

        def ending(error: BaseException | None) -> None:
            watchdog.arm(seconds, *ending_of(error))

        signals.subscribe(bound)
        try:
            start_ray(config, device, trainers=trainers)
            signals.install()  # Ray has installed its own handlers
            starting = False
            if signals.received:
                raise Interrupted(signals.received[0])
            processes = local_processes()
            try:
                run_loop(interruptible(_watching(processes, config, work, watchdog), signals, ending, grace))
            except (Interrupted, Preempted):
                raise
            except Exception as error:
                # If Ray is lost, that is the cause of every other error.
                lost = has_ended(processes)
                if lost is None:
                    raise
                raise lost from error
        except SystemExit:  # raised by Ray's handler of a signal while it starts
            if not signals.received:
                raise
            raise Interrupted(signals.received[0]) from None
        finally:
            ending(sys.exc_info()[1])
            stop_ray()


def _watching(processes: Mapping[str, psutil.Process], config: Config, work: Work, watchdog: Watchdog) -> Work:
    """Returns `work` with watches: it ends when Ray is lost, and with the process when the event loop is blocked."""

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
    """Runs `work`. SIGINT, SIGTERM and its alarm cancel it and wait for its clean-up; SIGUSR1 asks it to leave.

    With `grace`, the first SIGTERM asks it to leave and cancels it `grace` seconds later. `ending` is called as soon as
    it is known how the run ends."""
    loop = asyncio.get_running_loop()
    alarm = Alarm(ending)
    task = asyncio.ensure_future(work(alarm))
    stopped = asyncio.Event()

    def heard(signum: int) -> None:
        # A second signal during the stop changes nothing: the stop has its own deadlines.
        with suppress(RuntimeError):  # the loop has closed
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
    """Runs `main` like `asyncio.run`, on a loop whose deadlines pause while the process is stopped, and abandons tasks
    that resist cancellation and threads of hooks that do not return."""
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
                    # The loop re-raises these from any task or callback, such as a hook's, which keeps the error.
                    if task.done():
                        raise
        finally:
            loop.run_until_complete(_end(asyncio.all_tasks(loop)))
    finally:
        asyncio.set_event_loop(None)
        loop.close()  # which does not wait for the threads of its executor


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
    """Returns an exit callback for `stop` whose own failure does not hide the error that ended the run."""

    async def close(kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            await stop()
        except SlimxError as problem:
            if error is None:
                raise
            note(f"while stopping: {problem}")

    return close


async def together(starting: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Starts all and waits for them; the first failure ends the wait and cancels the rest."""
    tasks = [asyncio.ensure_future(work()) for work in starting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
