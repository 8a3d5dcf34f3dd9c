"""Runs reward hooks in processes of their own: one that computes for ever is killed at its deadline.

    driver  -- prompt, trajectory, text -->  worker: imports the hooks once, one call at a time
            <-- number or numbers ---------

A killed or crashed worker is replaced, and only its call fails; a call that found its worker dead or deaf goes to a new
one. Hooks see a copy of the trajectory: what they change in it is lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import queue
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from slimx.config.sections.reward import Reward as RewardConfig
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Group, Trajectory
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout.flow.reward_pool import RewardPool, Verdict, named, verdicts
from slimx.rollout.hook_loading import in_process, load_reward, name_of
from slimx.rollout.hooks import Reward, RewardContext
from slimx.runtime.exchange import exchange, reply
from slimx.runtime.logs import how_ended
from slimx.runtime.process import end_with_parent, kill_descendants

BEGIN_S = 120.0
"""Seconds for a new process to import the driver's modules on a loaded machine."""
TAKE_S = 10.0
"""Seconds for a process that has begun, and is idle, to take a call."""
TRIES = 3
"""Processes that a call is offered before it fails."""


class RewardProcesses:
    """`config.workers` processes, each started with its first call. A thread waits for each call."""

    def __init__(
        self, config: RewardConfig, reward: Reward, tokenizer_path: str, facts: dict[str, Any], take_s: float = TAKE_S
    ):
        """`reward`: the hook that `config` names, which each worker loads for itself. `tokenizer_path`: directory that
        it loads the tokenizer from if a hook uses it. `facts`: of `form_facts`. `take_s`: seconds in
        which an idle worker takes a call."""
        self.config, self.reward, self.tokenizer_path = config, reward, tokenizer_path
        self._hook = config.model_dump_json(), json.dumps(facts)
        """Text from which a worker loads its hook, and by which it knows one that it has loaded."""
        self.killed = 0
        """Calls ended at their deadline."""
        self.replaced = 0
        """Idle workers that took no call: they had died, or did not answer."""
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="slimx-reward-process")
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        """Idle workers. The one used last comes first, so that few calls start few processes."""
        self._workers = [_Worker(take_s) for _ in range(config.workers)]
        for worker in reversed(self._workers):
            self._idle.put(worker)

    async def judge(self, ctx: RewardContext, judged: Trajectory | Group) -> Verdict | list[Verdict]:
        """Judge as `RewardPool.judge` does."""
        call = self._hook, self.tokenizer_path, replace(ctx, tokenizer=None), judged
        taken: list[_Worker] = []
        try:
            value, logged = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, call, taken)
        except asyncio.CancelledError:
            for worker in taken:
                worker.kill()  # which frees the thread that waits for it
            raise
        ctx.metrics.update(logged)  # the hook logged into the copy that the process has
        return verdicts(value, judged, self.reward)

    def close(self) -> None:
        """End the workers and what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def _ask(self, call: tuple[Any, ...], taken: list[_Worker]) -> Any:
        """The hook's result and what it logged, awaited in a thread."""
        worker = self._idle.get()  # there is one for each thread
        taken.append(worker)
        try:
            return self._judged(worker, call)
        finally:
            taken.clear()
            self._idle.put(worker)

    def _judged(self, worker: _Worker, call: tuple[Any, ...]) -> Any:
        name, what = name_of(self.reward), named(call[-1])
        for _ in range(TRIES):
            try:
                worker.offer(call)
                break
            except (TimeoutError, EOFError, OSError):
                self.replaced += 1
                worker.kill()
        else:
            raise SlimxError(
                f"none of {TRIES} processes took the call of reward hook {name} for {what}; the machine is out of "
                "memory or processes, or importing the hook fails: import it alone to see",
                code="reward.worker",
                about=name,
            )
        try:
            went_well, value = worker.result(self.config.deadline)
        except TimeoutError:
            self.killed += 1
            raise DeadlineError(f"the reward of {what}", self.config.deadline, name) from None
        except (EOFError, OSError):
            raise SlimxError(
                f"the process of reward hook {name} {worker.how_ended()} while it judged {what}; "
                "run the hook on it alone to see why",
                code="reward.crash",
                about=name,
            ) from None
        if not went_well:
            raise SlimxError(f"reward hook {name} raised {value}", code="reward.raised", about=name)
        return value


class _Worker:
    """A process that judges, one call after the other; a new one takes the place of one that was killed."""

    def __init__(self, take_s: float) -> None:
        self._take_s = take_s
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._ending = threading.Lock()
        """Held while a process is ended: of two threads that reap one, the second is told that it lives."""

    def offer(self, call: tuple[Any, ...]) -> None:
        """Hand over a call. Raises TimeoutError, EOFError or OSError if the process did not take it."""
        if self._closed:
            raise SlimxError("a reward was asked for after its workers were told to end")
        seconds = self._take_s
        if not self._lives():
            self._start()
            seconds = BEGIN_S
        self._exchange(call, seconds)

    def result(self, seconds: float) -> tuple[bool, Any]:
        """Outcome of the call: (True, what the hook returned), or (False, what it raised)."""
        return self._exchange(None, seconds)

    def how_ended(self) -> str:
        assert self._process is not None
        self._process.join(TAKE_S)
        return how_ended(self._process.exitcode)

    def kill(self) -> None:
        """End the process and what it started, whatever it is at; SIGKILL reaches a stopped one too."""
        if self._process is not None:
            self._kill(self._process)

    def close(self) -> None:
        self._closed = True
        self.kill()
        if self._connection is not None:
            self._connection.close()

    def _exchange(self, message: Any, seconds: float) -> Any:
        # A deadline that strikes late must not end the process that has come in this one's place.
        return exchange(self._connection, message, seconds, partial(self._kill, self._process))

    def _lives(self) -> bool:
        with self._ending:
            return self._process is not None and self._process.is_alive()

    def _kill(self, process: BaseProcess) -> None:
        with self._ending:
            if process.is_alive():
                kill_descendants(process.pid)
                process.kill()
                process.join(TAKE_S)

    def _start(self) -> None:
        if self._connection is not None:
            self._connection.close()
        # A fork would take along the driver's threads and connections.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()


def reward_runner(
    config: RewardConfig, reward: Reward, tokenizer_path: str, facts: dict[str, Any]
) -> RewardPool | RewardProcesses:
    """The runner of reward calls that `reward.isolation` asks for."""
    if in_process(config, reward):
        return RewardProcesses(config, reward, tokenizer_path, facts)
    return RewardPool(reward, workers=config.workers, deadline_s=config.deadline)


class _LaterTokenizer:
    """The tokenizer at `path`, loaded when it is first asked for something: most hooks never do."""

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(_tokenizer(self._path), name)


@cache
def _tokenizer(path: str) -> Any:
    return load_tokenizer(path)


@cache
def _load(config: str, facts: str) -> Reward:
    reward = load_reward(RewardConfig.model_validate_json(config), json.loads(facts))
    assert reward is not None
    return reward


def _serve(connection: Connection, driver: int) -> None:
    """Main loop of a worker: it takes a call, says so, and answers with the hook's result once it is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt ends
    end_with_parent(driver)
    # It warns at every use of a time-out in a thread; here they are in the main one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    while True:
        try:
            call = connection.recv()
            connection.send(None)
            connection.recv()
        except EOFError:
            return
        reply(connection, partial(_judge, *call))


def _judge(
    hook: tuple[str, str], tokenizer_path: str, ctx: RewardContext, judged: Trajectory | Group
) -> tuple[Any, dict[str, float]]:
    ctx = replace(ctx, tokenizer=_LaterTokenizer(tokenizer_path))
    return asyncio.run(_load(*hook)(ctx, judged)), ctx.metrics
