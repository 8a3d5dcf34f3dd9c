"""Runs reward hooks in processes, so that a call that never returns can be killed at its deadline.

    driver  -- prompt, trajectory, text -->  worker: imports the hooks once, runs one call at a time
            <-- number or numbers ---------

A worker that was killed or has crashed is replaced, and only its call fails. A call that its worker does not accept,
because the worker is dead or does not respond, goes to a new worker. Hooks get a copy of the trajectory, so their
changes to it are lost.
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
"""Time limit in seconds for a new process to accept a call. It is long because the process first imports the driver's
modules, which is slow on a loaded machine."""
TAKE_S = 10.0
"""Time limit in seconds for an idle process to accept a call."""
TRIES = 3
"""Number of worker processes that are tried for a call before the call fails."""


class _Call(NamedTuple):
    """One call of the reward hook, as the driver sends it to a worker process."""

    hook: tuple[str, str]
    tokenizer_path: str
    ctx: RewardContext
    judged: Trajectory | Group


_Outcome = tuple[Literal[True], tuple[object, dict[str, float]]] | tuple[Literal[False], str]
"""Outcome of a call, as a worker sends it: (True, (the hook's return value, its logged numbers)), or (False, error
text)."""


class RewardProcesses:
    """Pool of `config.workers` processes that run calls of a reward hook. Each process starts at its first call; a
    driver thread waits for the result of each call."""

    def __init__(self, config: RewardConfig, reward: Reward, tokenizer_path: str, facts: Json, take_s: float = TAKE_S):
        """Creates the workers without starting processes.

        `reward`: the hook that `config` names; every worker loads a copy. `tokenizer_path`: directory of the
        tokenizer, which is loaded when a hook first uses it. `facts`: return value of `form_facts`, the properties of
        the run that hooks of other frameworks need. `take_s`: seconds within which an idle worker must accept a call.
        """
        self.config = config
        self.reward = reward
        self.tokenizer_path = tokenizer_path
        self._hook = config.model_dump_json(), json.dumps(facts)
        """JSON strings from which a worker loads its hook; also the key under which the worker caches the hook."""
        self.killed = 0
        """Number of calls killed at their deadline."""
        self.replaced = 0
        """Number of idle workers that were replaced because they were dead or did not respond."""
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="slimx-reward-process")
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        """Idle workers, the last used one first, so that few concurrent calls start few processes."""
        self._workers = [_Worker(take_s) for _ in range(config.workers)]
        for worker in reversed(self._workers):
            self._idle.put(worker)

    async def judge(self, ctx: RewardContext, judged: Trajectory | Group) -> Verdict | list[Verdict]:
        """Runs the hook in a worker process and returns its rewards, like `RewardPool.judge`."""
        call = _Call(self._hook, self.tokenizer_path, _without_tokenizer(ctx), judged)
        taken: list[_Worker] = []
        try:
            value, logged = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, call, taken)
        except asyncio.CancelledError:
            for worker in taken:
                worker.kill()  # wakes the thread that waits for the worker
            raise
        ctx.metrics.update(logged)  # the hook logged into the copy in the worker
        return verdicts(value, judged, self.reward)

    def close(self) -> None:
        """Kills the workers; the calls that they are running fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def _ask(self, call: _Call, taken: list[_Worker]) -> tuple[object, dict[str, float]]:
        """Runs one call in an idle worker, and returns the hook's result and its logged metrics.

        Blocks, so it is called in a thread. `taken`: list that contains the worker while it runs the call.
        """
        worker = self._idle.get()  # does not wait: there are as many workers as threads
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
                f"none of {TRIES} worker processes accepted the call of reward hook {name} for {subject}; free memory "
                "or process ids on the machine, and make sure that a new Python process can import the hook",
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
                f"the process of reward hook {name} {worker.how_ended()} while it computed the reward of {subject}; "
                "run the hook outside slimx to find the cause",
                code="reward.crash",
                about=name,
            ) from None
        if outcome[0]:
            return outcome[1]
        raise SlimxError(
            f"reward hook {name} raised {outcome[1]}; fix this error in the hook", code="reward.raised", about=name
        )


class _Worker:
    """A process that runs one call at a time. If the process has died, the next call starts a new one."""

    def __init__(self, take_s: float) -> None:
        self._take_s = take_s
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._ending = threading.Lock()
        """Lock that lets one thread at a time reap the process: if two did so at once, the second would see it as
        alive."""

    def offer(self, call: _Call) -> None:
        """Sends a call to the process, after starting a new one if none is alive.

        Raises TimeoutError, EOFError or OSError if the process does not accept the call in time.
        """
        if self._closed:
            raise SlimxError("a reward was requested after its workers were stopped; await rewards before the run ends")
        seconds = self._take_s
        if not self._lives():
            self._start()
            seconds = BEGIN_S
        self._exchange(call, seconds)

    def result(self, seconds: float) -> _Outcome:
        """Returns the outcome of the accepted call.

        Raises TimeoutError after `seconds`, and EOFError or OSError if the process has died.
        """
        return self._exchange(None, seconds)

    def how_ended(self) -> str:
        assert self._process is not None
        self._process.join(TAKE_S)
        return how_ended(self._process.exitcode)

    def kill(self) -> None:
        """Kills the process and its children with SIGKILL, which also ends suspended ones."""
        if self._process is not None:
            self._kill(self._process)

    def close(self) -> None:
        self._closed = True
        self.kill()
        if self._connection is not None:
            self._connection.close()

    def _exchange(self, message: _Call | None, seconds: float) -> _Outcome:
        assert self._connection is not None and self._process is not None  # `offer` has started it
        # Bound to this process: a late deadline must not kill a process that has replaced it.
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
        # A forked process would inherit the driver's locks and connections.
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, os.getpid()), daemon=True)
        self._process.start()
        remote.close()


def _without_tokenizer(ctx: RewardContext) -> RewardContext:
    """Returns a copy of `ctx` without its tokenizer, which is expensive to pickle; the worker process adds one that it
    loads."""
    return replace(ctx, tokenizer=cast("PreTrainedTokenizerBase", None))


def reward_runner(
    config: RewardConfig, reward: Reward, tokenizer_path: str, facts: Json
) -> RewardPool | RewardProcesses:
    """Returns the pool of threads or processes in which `reward` runs, depending on `reward.isolation` and the
    hook's requirements.

    `tokenizer_path`: directory of the tokenizer. `facts`: return value of `form_facts`, the properties of the run that
    hooks of other frameworks need.
    """
    if in_process(config, reward):
        return RewardProcesses(config, reward, tokenizer_path, facts)
    return RewardPool(reward, workers=config.workers, deadline_s=config.deadline)


class _LaterTokenizer:
    """The tokenizer at `path`, loaded at its first use because most hooks never use it."""

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
    """Runs the main loop of a worker process: receives a call, confirms it, and sends the hook's result on request.

    `driver`: process id of the driver; the worker exits when the driver does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles interrupts
    end_with_parent(driver)
    # math_verify warns about time-outs outside the main thread, but here hooks run on the main thread.
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
