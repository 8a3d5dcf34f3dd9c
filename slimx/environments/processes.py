"""Environments of rollouts: in the driver's event loop, or in a process of its own.

An environment that computes would hold up every rollout of the driver. In a process of its own it may: a server that
has imported the environment's module forks one process for each, so that starting one costs milliseconds, and what one
does (hang, crash, eat memory) ends with its own process. Only `processes` of their calls run at once; the others wait,
and their processes sleep.

    driver  -- reset(prompt, seed) | step(text) | close() -->  process of one environment, from first to last call
            <-- the answer, or what was raised ------------
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
from slimx.runtime.exchange import exchange, reply
from slimx.runtime.logs import how_ended
from slimx.runtime.process import adopt_orphans, kill_descendants
from slimx.runtime.tasks import in_thread

KEY = "rollout.options.environment"
CLOSE_S = 5.0
"""For an environment's own `close` before its process is killed."""


class Environments:
    """Makes the environments of a run. Owned by what makes its groups; `close` ends their processes."""

    def __init__(self) -> None:
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._living: set[InProcess] = set()

    def make(
        self, path: str, options: dict[str, Any], *, deadline_s: float, rollout: str, processes: int = 0
    ) -> Environment:
        """An environment of the class at `path`. Its calls raise DeadlineError after `deadline_s` seconds, naming
        `rollout`. `processes`: calls that compute at once, in processes; 0: it lives in the driver's event loop."""
        if not processes:
            return InDriver(imported(KEY, path, ENVIRONMENTS)(**options), path, deadline_s, rollout)
        if processes not in self._pools:
            # A thread waits for each call that computes: their number bounds the calls.
            self._pools[processes] = ThreadPoolExecutor(processes, thread_name_prefix="slimx-environment")
        made = InProcess(self._pools[processes], self._living, path, options, deadline_s, rollout)
        self._living.add(made)
        return made

    def close(self) -> None:
        """Kill the processes of environments that are still there."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for environment in list(self._living):
            environment.kill()


class InDriver:
    """An environment in the event loop of the driver, with a deadline for each call."""

    def __init__(self, world: Environment, path: str, deadline_s: float, rollout: str) -> None:
        self._world, self._path, self._deadline_s, self._rollout = world, path, deadline_s, rollout

    async def reset(self, prompt: Prompt, seed: int) -> str | Begin:
        return await self._within(self._world.reset(prompt, seed))

    async def step(self, text: str) -> Step:
        return await self._within(self._world.step(text))

    async def close(self) -> None:
        await self._within(self._world.close(), "the end")

    async def _within(self, call: Awaitable[Any], what: str = "a step") -> Any:
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():  # the environment's own
                raise
            raise DeadlineError(f"{what} of rollout {self._rollout}", self._deadline_s, self._path) from None


class InProcess:
    """An environment in a process of its own, which begins with the first call."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        living: set[InProcess],
        path: str,
        options: dict[str, Any],
        deadline_s: float,
        rollout: str,
    ) -> None:
        self._pool, self._living = pool, living
        self._path, self._options, self._deadline_s, self._rollout = path, options, deadline_s, rollout
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._lifeline: Connection | None = None
        """Nothing is written to it: the process ends when it is closed, as it is when the driver dies."""
        self._ended = False

    async def reset(self, prompt: Prompt, seed: int) -> str | Begin:
        return await self._call("reset", prompt, seed)

    async def step(self, text: str) -> Step:
        return await self._call("step", text)

    async def close(self) -> None:
        """Let the environment close itself, if it is there and idle, and end its process."""
        try:
            if self._process is not None and not self._ended and self._process.is_alive():
                await self._call("close", deadline_s=min(self._deadline_s, CLOSE_S))
        finally:
            await in_thread(self.kill)

    def kill(self) -> None:
        """End the process and what it started, whatever it is at."""
        self._ended = True
        self._living.discard(self)
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            kill_descendants(self._process.pid)
            self._process.kill()

    async def _call(self, name: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, self._ask, name, arguments, seconds)
        except asyncio.CancelledError:
            threading.Thread(target=self.kill, daemon=True).start()  # which frees the thread that waits for it
            raise

    def _ask(self, name: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """The answer of one call, awaited in a thread of the pool."""
        if self._connection is None:
            self._start()
        assert self._connection is not None and self._process is not None
        if self._ended:  # meanwhile
            self.kill()
        try:
            went_well, answer = exchange(self._connection, (name, arguments), seconds, self.kill)
            if name == "close":
                self._process.join(CLOSE_S)
        except TimeoutError:
            raise DeadlineError(f"a step of rollout {self._rollout}", seconds, self._path) from None
        except (EOFError, OSError):
            self._process.join(CLOSE_S)
            raise SlimxError(
                f"the process of the environment {self._path} of rollout {self._rollout} "
                f"{how_ended(self._process.exitcode)} in {name}; run it on this prompt alone to see why",
                code="environment.crash",
                about=self._rollout,
            ) from None
        if not went_well:
            raise SlimxError(
                f"the environment {self._path} of rollout {self._rollout} raised {answer} in {name}",
                code="environment.raised",
                about=self._path,
            )
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # Taken in by the server when it starts, with the first environment of the run: its children have them at once.
        context.set_forkserver_preload(["__main__", __name__, module_of(self._path, ENVIRONMENTS)])
        self._connection, theirs = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        arguments = theirs, lifeline, self._path, self._options
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        lifeline.close()


def _serve(connection: Connection, lifeline: Connection, path: str, options: dict[str, Any]) -> None:
    """The main function of the process of one environment."""
    _end_with(lifeline)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt ends
    world: Environment | None = None

    def call(name: str, arguments: tuple[Any, ...]) -> Any:
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
    """Have the kernel end this process when the other end of a pipe is closed: by SIGIO, whose default is to end, and
    which waits for no interpreter that computes. The parent of this process outlives the driver as long as this does.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if lifeline.poll():  # it was closed before
        os._exit(128 + signal.SIGIO)


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call
