"""Runs reward hooks in processes: one that never returns is killed at its deadline.

    driver  -- prompt, trajectory, text -->  worker: imports the hooks once, one call at a time
            <-- number or numbers ---------

A killed or crashed worker is replaced, and only its call fails; a call whose worker is dead or does not respond goes to
a new one. Hooks get a copy of the trajectory: their changes to it are lost.
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
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from slimx.config.sections.reward import Reward as RewardConfig
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Group, Trajectory
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.rollout.flow.reward_pool import RewardPool, Verdict, named, verdicts
from slimx.rollout.hook_loading import in_process, load_reward, name_of
from slimx.rollout.hooks import Reward, RewardContext
from slimx.runtime.exchange import exchange, reply
from slimx.runtime.logs import how_ended
from slimx.runtime.process import end_with_parent, kill_descendants

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN_S = 120.0
"""Deadline of a new process to import the driver's modules on a loaded machine, in seconds."""
TAKE_S = 10.0
"""Deadline of an idle process to accept a call, in seconds."""
TRIES = 3
"""Number of processes that are tried before a call fails."""


class _Call(NamedTuple):
    """Arguments of `_judge`."""

    hook: tuple[str, str]
    tokenizer_path: str
    ctx: RewardContext
    judged: Trajectory | Group


_Outcome = tuple[Literal[True], tuple[object, dict[str, float]]] | tuple[Literal[False], str]
"""(True, the result of `_judge`), or (False, its error as text)."""


class RewardProcesses:
    """`config.workers` processes, each started by its first call. A thread waits for each call."""

    def __init__(self, config: RewardConfig, reward: Reward, tokenizer_path: str, facts: Json, take_s: float = TAKE_S):
        """Creates the workers without starting processes.

        `reward`: the hook of `config`, which each worker loads itself. `tokenizer_path`: directory of the tokenizer,
        loaded if a hook uses it. `facts`: result of `form_facts`. `take_s`: deadline of an idle worker to accept a
        call, in seconds.
        """
        self.config = config
        self.reward = reward
        self.tokenizer_path = tokenizer_path
        self._hook = config.model_dump_json(), json.dumps(facts)
        """JSON from which a worker loads its hook, also the key of its cache."""
        self.killed = 0
        """Number of calls killed at their deadline."""
        self.replaced = 0
        """Number of idle workers that accepted no call: dead, or without a response."""
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="slimx-reward-process")
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        """Idle workers. The last used one is first: few calls start few processes."""
        self._workers = [_Worker(take_s) for _ in range(config.workers)]
        for worker in reversed(self._workers):
            self._idle.put(worker)

    async def judge(self, ctx: RewardContext, judged: Trajectory | Group) -> Verdict | list[Verdict]:
        """Judges like `RewardPool.judge`."""
        call = _Call(self._hook, self.tokenizer_path, _without_tokenizer(ctx), judged)
        taken: list[_Worker] = []
        try:
            value, logged = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, call, taken)
        except asyncio.CancelledError:
            for worker in taken:
                worker.kill()  # frees the waiting thread
            raise
        ctx.metrics.update(logged)  # the hook logged into the worker's copy
        return verdicts(value, judged, self.reward)

    def close(self) -> None:
        """Kills the workers and their calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def _ask(self, call: _Call, taken: list[_Worker]) -> tuple[object, dict[str, float]]:
        """Returns the hook's result and its logged metrics. Blocks: called in a thread."""
        worker = self._idle.get()  # there is one for each thread
        taken.append(worker)
        try:
            return self._judged(worker, call)
        finally:
            taken.clear()
            self._idle.put(worker)

    def _judged(self, worker: _Worker, call: _Call) -> tuple[object, dict[str, float]]:
        name = name_of(self.reward)
        subject = named(call.judged)
        for _ in range(TRIES):
            try:
                worker.offer(call)
                break
            except (TimeoutError, EOFError, OSError):
                self.replaced += 1
                worker.kill()
        else:
            raise SlimxError(
                f"none of {TRIES} processes accepted the call of reward hook {name} for {subject}; the machine is out "
                "of memory or processes, or importing the hook fails: import it separately",
                code="reward.worker",
                about=name,
            )
        try:
            outcome = worker.result(self.config.deadline)
        except TimeoutError:
            self.killed += 1
            raise DeadlineError(f"the reward of {subject}", self.config.deadline, name) from None
        except (EOFError, OSError):
            raise SlimxError(
                f"the process of reward hook {name} {worker.how_ended()} while it judged {subject}; "
                "run the hook separately on it",
                code="reward.crash",
                about=name,
            ) from None
        if outcome[0]:
            return outcome[1]
        raise SlimxError(f"reward hook {name} raised {outcome[1]}", code="reward.raised", about=name)


class _Worker:
    """A process that runs one call at a time; a killed one is replaced."""

    def __init__(self, take_s: float) -> None:
        self._take_s = take_s
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._ending = threading.Lock()
        """Held while a process is reaped: of two concurrent threads, the second would see it as alive."""

    def offer(self, call: _Call) -> None:
        """Sends a call. Raises TimeoutError, EOFError or OSError if the process did not accept it."""
        if self._closed:
            raise SlimxError("a reward was requested after its workers were stopped")
        seconds = self._take_s
        if not self._lives():
            self._start()
            seconds = BEGIN_S
        self._exchange(call, seconds)

    def result(self, seconds: float) -> _Outcome:
        """Returns the outcome of the call. Raises TimeoutError, EOFError or OSError if there is none."""
        return self._exchange(None, seconds)

    def how_ended(self) -> str:
        assert self._process is not None
        self._process.join(TAKE_S)
        return how_ended(self._process.exitcode)

    def kill(self) -> None:
        """Kills the process and its children, even if stopped (SIGKILL)."""
        if self._process is not None:
            self._kill(self._process)

    def close(self) -> None:
        self._closed = True
        self.kill()
        if self._connection is not None:
            self._connection.close()

    def _exchange(self, message: _Call | None, seconds: float) -> _Outcome:
        assert self._connection is not None and self._process is not None  # `offer` has started it
        # A late deadline must not kill the process that replaced this one.
        return exchange(self._connection, message, seconds, partial(self._kill, self._process))

    def _lives(self) -> bool:
        with self._ending:
            return self._process is not None and self._process.is_alive()

    def _kill(self, process: BaseProcess) -> None:
        with self._ending:
            if process.is_alive() and process.pid is not None:
                kill_descendants(process.pid)
                process.kill()
                process.join(TAKE_S)

    def _start(self) -> None:
        if self._connection is not None:
            self._connection.close()
        # A fork would inherit the driver's locks and connections.
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, os.getpid()), daemon=True)
        self._process.start()
        remote.close()


def _without_tokenizer(ctx: RewardContext) -> RewardContext:
    """Returns a copy that can be pickled cheaply: the worker sets its own tokenizer."""
    return replace(ctx, tokenizer=cast("PreTrainedTokenizerBase", None))


def reward_runner(
    config: RewardConfig, reward: Reward, tokenizer_path: str, facts: Json
) -> RewardPool | RewardProcesses:
    """Returns the runner of reward calls for `reward.isolation`."""
    if in_process(config, reward):
        return RewardProcesses(config, reward, tokenizer_path, facts)
    return RewardPool(reward, workers=config.workers, deadline_s=config.deadline)


class _LaterTokenizer:
    """The tokenizer at `path`, loaded at its first use: most hooks never use it."""

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> object:
        return getattr(_tokenizer(self._path), name)


@cache
def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(path)


@cache
def _load(config: str, facts: str) -> Reward:
    reward = load_reward(RewardConfig.model_validate_json(config), json.loads(facts))
    assert reward is not None
    return reward


def _serve(connection: Connection, driver: int) -> None:
    """Runs the main loop of a worker: receives a call, confirms it, and sends the hook's result on request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles interrupts
    end_with_parent(driver)
    # It warns about time-outs outside of the main thread, on which hooks run here.
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
) -> tuple[object, dict[str, float]]:
    ctx = replace(ctx, tokenizer=cast("PreTrainedTokenizerBase", _LaterTokenizer(tokenizer_path)))
    return asyncio.run(_load(*hook)(ctx, judged)), ctx.metrics
