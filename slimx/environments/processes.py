"""Runs environments of rollouts in the driver's event loop or in separate processes.

In the event loop, an environment that computes for long delays every rollout of the driver. In a separate process it
does not, and its failures (hangs, crashes, memory) stay in that process. A fork server that has imported the
environment's module forks one process per environment, so that a start takes milliseconds. At most `processes` calls of
environments run at once; other calls wait while their processes sleep.

    driver  -- reset(prompt, seed) | step(text) | close() -->  process of one environment, from first to last call
            <-- the result, or the exception --------------
"""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from slimx.data.records import Prompt
from slimx.dotted import imported, module_of
from slimx.environments.base import ENVIRONMENTS, Begin, Environment, Step
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.runtime.exchange import exchange, reply
from slimx.runtime.logs import how_ended
from slimx.runtime.process import adopt_orphans, kill_descendants
from slimx.runtime.tasks import in_thread, within

KEY = "rollout.options.environment"
CLOSE_S = 5.0
"""Seconds that an environment's `close` may take before the environment's process is killed."""


class Environments:
    """Factory for a run's environments, owned by the `GroupMaker`; `close` kills their processes."""

    def __init__(self) -> None:
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._living: set[InProcess] = set()

    def make(self, path: str, options: Json, *, deadline_s: float, rollout: str, processes: int = 0) -> Environment:
        """Returns an environment of the class at `path`, created with `options`.

        `rollout`: id of the rollout, for error messages. Calls to the environment raise DeadlineError after
        `deadline_s` seconds. `processes`: maximum number of concurrent calls in separate processes; 0 to run the
        environment in the driver's event loop.
        """
        if not processes:
            return InDriver(imported(KEY, path, ENVIRONMENTS)(**options), path, deadline_s, rollout)
        if processes not in self._pools:
            # One thread waits for each call, so the number of threads bounds the number of concurrent calls.
            self._pools[processes] = ThreadPoolExecutor(processes, thread_name_prefix="slimx-environment")
        environment = InProcess(self._pools[processes], self._living, path, options, deadline_s, rollout)
        self._living.add(environment)
        return environment

    def close(self) -> None:
        """Kills the processes of all environments that are still open."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for environment in list(self._living):
            environment.kill()


class InDriver:
    """An environment in the driver's event loop, with a deadline per call."""

    def __init__(self, world: Environment, path: str, deadline_s: float, rollout: str) -> None:
        self._world = world
        self._path = path
        self._deadline_s = deadline_s
        self._rollout = rollout

    async def reset(self, prompt: Prompt, seed: int) -> str | Begin:
        return await self._within(self._world.reset(prompt, seed))

    async def step(self, text: str) -> Step:
        return await self._within(self._world.step(text))

    async def close(self) -> None:
        await self._within(self._world.close(), "the end")

    async def _within[T](self, call: Awaitable[T], operation: str = "a step") -> T:
        return await within(self._deadline_s, call, f"{operation} of rollout {self._rollout}", self._path)


class InProcess:
    """An environment in a separate process, which is started by the first call to the environment."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        living: set[InProcess],
        path: str,
        options: Json,
        deadline_s: float,
        rollout: str,
    ) -> None:
        self._pool = pool
        self._living = living
        self._path = path
        self._options = options
        self._deadline_s = deadline_s
        self._rollout = rollout
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._lifeline: Connection | None = None
        """Write end of a pipe to the process. Nothing is written: the process ends when this end is closed, as it is
        when the driver dies."""
        self._ended = False

    async def reset(self, prompt: Prompt, seed: int) -> str | Begin:
        return await self._call("reset", prompt, seed)

    async def step(self, text: str) -> Step:
        return await self._call("step", text)

    async def close(self) -> None:
        """Closes the environment if it is idle, and then kills its process."""
        try:
            if self._process is not None and not self._ended and self._process.is_alive():
                await self._call("close", deadline_s=min(self._deadline_s, CLOSE_S))
        finally:
            await in_thread(self.kill)

    def kill(self) -> None:
        """Kills the process and its children, whatever they are doing."""
        self._ended = True
        self._living.discard(self)
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            kill_descendants(self._process.pid)
            self._process.kill()

    async def _call(self, name: str, *arguments: object, deadline_s: float | None = None) -> Any:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, self._ask, name, arguments, seconds)
        except asyncio.CancelledError:
            threading.Thread(target=self.kill, daemon=True).start()  # wakes the thread that waits for the call
            raise

    def _ask(self, name: str, arguments: tuple[object, ...], seconds: float) -> object:
        """Runs one call in the process and returns its result. Blocks, so it is called in a thread of the pool.

        `name`: method of the environment. `seconds`: time limit for the call.
        """
        if self._connection is None:
            self._start()
        assert self._connection is not None and self._process is not None
        if self._ended:  # killed while the process started
            self.kill()
        try:
            succeeded, result = exchange(self._connection, (name, arguments), seconds, self.kill)
            if name == "close":
                self._process.join(CLOSE_S)
        except TimeoutError:
            raise DeadlineError(f"a step of rollout {self._rollout}", seconds, self._path) from None
        except (EOFError, OSError):
            self._process.join(CLOSE_S)
            raise SlimxError(
                f"the process of the environment {self._path} of rollout {self._rollout} "
                f"{how_ended(self._process.exitcode)} in {name}; run the environment outside slimx on this rollout's "
                "prompt to find the cause",
                code="environment.crash",
                about=self._rollout,
            ) from None
        if not succeeded:
            raise SlimxError(
                f"the environment {self._path} of rollout {self._rollout} raised {result} in {name}; correct the "
                "environment's code",
                code="environment.raised",
                about=self._path,
            )
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # The fork server, which the run's first environment starts, imports these modules once; its forks inherit them.
        context.set_forkserver_preload(["__main__", __name__, module_of(self._path, ENVIRONMENTS)])
        self._connection, remote = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        arguments = (remote, lifeline, self._path, self._options)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        remote.close()
        lifeline.close()


def _serve(connection: Connection, lifeline: Connection, path: str, options: Json) -> None:
    """Executes the calls to one environment, as the main function of that environment's process."""
    _end_with(lifeline)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles interrupts
    world: Environment | None = None

    def call(name: str, arguments: tuple[object, ...]) -> object:
        nonlocal world
        world = world or imported(KEY, path, ENVIRONMENTS)(**options)
        return runner.run(_awaited(getattr(world, name)(*arguments)))

    try:
        with asyncio.Runner() as runner:
            while True:
                try:
                    name, arguments = connection.recv()
                except EOFError:
                    return
                reply(connection, partial(call, name, arguments))
                if name == "close":
                    return
    finally:
        kill_descendants(os.getpid())


def _end_with(lifeline: Connection) -> None:
    """Makes the kernel end this process when the other end of the pipe `lifeline` is closed.

    The kernel then sends SIGIO, whose default action terminates the process even while the interpreter computes. The
    parent's death cannot serve this purpose, because the parent is the fork server, which outlives the driver as long
    as this process runs.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if lifeline.poll():  # the other end is already closed
        os._exit(128 + signal.SIGIO)


async def _awaited[T](call: Awaitable[T]) -> T:
    return await call
