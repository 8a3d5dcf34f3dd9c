"""Runs reward hooks in processes of their own: one that computes for ever is killed at its deadline.

    driver  -- prompt, trajectory, text -->  worker: imports the hooks once, one call at a time
            <-- number or numbers ---------

A killed or crashed worker is replaced, and only its call fails. Workers take calls from one pipe, so that one that is
stopped while it is idle can keep the others from it: when no call ends for longer than one can take, all workers are
replaced, and what waits is judged by the new ones. Hooks see a copy of the trajectory: what they change in it is lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import time
from concurrent.futures import TimeoutError as Late
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from pebble import ProcessExpired, ProcessPool

from slimx.adapters.slime_hooks.arguments import RunFacts
from slimx.config.reward import Reward as RewardConfig
from slimx.data.records import Group, Trajectory
from slimx.data.tokens import load_tokenizer
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout.hooks import Reward, RewardContext, in_process, load_reward, name_of
from slimx.rollout.process import end_with_parent
from slimx.rollout.reward_pool import RewardPool, Verdict, named, verdicts

START_S = 120.0
"""Seconds in which a worker starts on a loaded machine: it imports the hook and all that this needs."""
LOOK_S = 0.5
"""Seconds between two looks at a call that may have been given to workers that are gone."""
TRIES = 3
"""Generations of workers that a call is given to, at most."""


class _NeverBegun(Exception):
    """No worker took a call."""


class RewardProcesses:
    """`config.workers` processes, started with the first call."""

    def __init__(
        self, config: RewardConfig, reward: Reward, tokenizer_path: str, run: RunFacts, start_s: float = START_S
    ):
        """`reward`: the hook that `config` names, which each worker loads for itself. `tokenizer_path`: directory that
        it loads the tokenizer from if a hook uses it. `run`: what hooks of slime's form are told. `start_s`: seconds in
        which a worker starts."""
        self.config, self.reward, self.tokenizer_path = config, reward, tokenizer_path
        self._hook = (config.model_dump_json(), json.dumps(asdict(run)))
        """What a worker loads its hook from: text, by which it knows one that it has loaded."""
        self.killed = 0
        """Calls ended at their deadline."""
        self.replaced = 0
        """Times that all workers were replaced because none took a call."""
        self._stalled_s = config.deadline + start_s
        self._ended = time.monotonic()
        """When a call ended last."""
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self.config.workers,
            # A fork would take along the driver's threads and connections.
            context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(os.getpid(),),
        )

    async def judge(self, ctx: RewardContext, judged: Trajectory | Group) -> Verdict | list[Verdict]:
        """As `RewardPool.judge`."""
        name, deadline = name_of(self.reward), self.config.deadline
        try:
            value = await self._ask(replace(ctx, tokenizer=None), judged)
        except _NeverBegun:
            waited = TRIES * self._stalled_s
            raise DeadlineError(f"a worker for the reward of {named(judged)}", waited, f"workers of {name}") from None
        except Late:
            self.killed += 1
            raise DeadlineError(f"the reward of {named(judged)}", deadline, name) from None
        except ProcessExpired as error:
            raise SlimxError(
                f"reward hook {name} ended its process while it judged {named(judged)} (exit status "
                f"{error.exitcode}); run the hook on it alone to see why"
            ) from error
        except Exception as error:
            raise SlimxError(f"reward hook {name} raised {type(error).__name__}: {error}") from error
        return verdicts(value, judged, name)

    async def _ask(self, ctx: RewardContext, judged: Trajectory | Group) -> Any:
        """What the hook returned, from workers that take calls. Raises _NeverBegun if none did."""
        for _ in range(TRIES):
            pool = self._pool
            call = pool.schedule(
                _judge, args=(self._hook, self.tokenizer_path, ctx, judged), timeout=self.config.deadline
            )
            answer, asked = asyncio.wrap_future(call), time.monotonic()
            try:
                while not answer.done():
                    idle = time.monotonic() - max(asked, self._ended)
                    if pool is not self._pool or (idle >= self._stalled_s and not call.running()):
                        break
                    await asyncio.wait({answer}, timeout=max(LOOK_S, self._stalled_s - idle))
                if answer.done() and pool is self._pool:
                    self._ended = time.monotonic()
                    return answer.result()
            finally:
                answer.cancel()
            if pool is self._pool:
                await self._replace_workers()
        raise _NeverBegun

    async def _replace_workers(self) -> None:
        """Kill all workers; calls that they have, and that wait, are given to new ones."""
        old, self._pool = self._pool, self._new_pool()
        self.replaced += 1
        self._ended = time.monotonic()
        await asyncio.to_thread(_end, old)

    def close(self) -> None:
        """End the workers and what they are at."""
        _end(self._pool)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def reward_runner(
    config: RewardConfig, reward: Reward, tokenizer_path: str, run: RunFacts
) -> RewardPool | RewardProcesses:
    """Where reward calls run, by `reward.isolation`."""
    if in_process(config, reward):
        return RewardProcesses(config, reward, tokenizer_path, run)
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
def _load(config: str, run: str) -> Reward:
    reward = load_reward(RewardConfig.model_validate_json(config), RunFacts(**json.loads(run)))
    assert reward is not None
    return reward


def _begin(driver: int) -> None:
    """What a worker does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt ends
    end_with_parent(driver)
    # It warns at every use of a time-out in a thread; here they are in the main one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _judge(hook: tuple[str, str], tokenizer_path: str, ctx: RewardContext, judged: Trajectory | Group) -> Any:
    ctx = replace(ctx, tokenizer=_LaterTokenizer(tokenizer_path))
    return asyncio.run(_load(*hook)(ctx, judged))
