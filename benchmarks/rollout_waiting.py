"""Rollouts that wait for tools, thousands at once on one driver: throughput, memory, cancellation and deadlines.

    python benchmarks/rollout_waiting.py [--only throughput memory deadlines] [--rounds 2] [--json FILE]

throughput  requests a second at an engine of an exact rate (benchmarks/waiting_engine.py) with `--count` rollouts in
            flight, each of which calls it and then waits 0.1 to 30 s for a tool, turn after turn: through a hook,
            through slimx.extras.agents.tools, by agents at the proxy, by these agents at a server of canned answers
            instead of slimx, and by plain asyncio (waiting_sides.py).
            The sides take turns, each in a process of its own. Each ends by cancelling all, which is timed
memory      anonymous memory of the driver for each rollout that waits, in a process of its own for each figure
deadlines   how late rollouts are ended at `rollout.rollout_deadline`, all at the same moment or spread over seconds

Seconds are those of a core of its own: CPU time of the process, and jumps over the time in which nothing is to do
(`waiting_engine.QuietLoop`). So the figures hold on a busy machine, and a run takes its CPU time alone. Client, engine
and agents are in the same process, over real sockets: what the engine's server costs is in every side's CPU time."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import waiting_sides as sides
from machine import surroundings
from quantities import positive, positive_float
from rollout_buffer import InOrder
from waiting_engine import Engine, QuietLoop

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.records import Prompt
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.orchestration.lifetime.garbage import frozen_heap
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import RolloutContext
from slimx.rollout.policy import PolicyClient

ROOT = Path(__file__).parents[1]
GROUP, AHEAD = 8, 4
"""Rollouts of a group, and open steps. Each step has half of the rollouts allowed in flight, so that the limit is
always reached."""
SLOTS, ENGINE_S = 128, 1.28
"""The engine's concurrent requests, and seconds of a response: 100 requests a second."""
WARMUP_S = 60.0
"""Seconds before the window of the throughput part, in which the first waits end and the engine's queue reaches its
steady state."""
DEADLINE_S, SPREAD_S = 100.0, 10.0
"""`rollout.rollout_deadline` of the deadlines part, and the seconds over which groups start."""
THROUGHPUT_GOAL, MEMORY_GOAL = 0.95, 100.0
"""Share of the engine's rate, and kB per rollout with `GOAL_COUNT` or more waiting, which share the fixed memory of the
process."""
GOAL_COUNT = 2000


def make_config(directory: Path, rollouts: int, **rollout: Any) -> Config:
    """Returns the configuration of a run with `rollouts` in flight."""
    settings = {
        "prompts_per_step": max(1, rollouts // GROUP // 2),
        "group_size": GROUP,
        "max_rollouts": rollouts,
        "max_failed_share": 1.0,
        "rollout_deadline": 3600,
    } | rollout
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            f"run.dir={directory}",
            f"model.path={directory}",
            f"schedule.max_staleness={AHEAD - 1}",
            f"rollout.sampling.max_new_tokens={sides.ANSWER}",
            *(f"rollout.{key}={value}" for key, value in settings.items()),
        ],
    )


def now() -> float:
    """Returns the time of the running loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


def spread(of: Any) -> dict[str, float]:
    """Returns the median, the 99th percentile and the maximum."""
    return {name: float(np.percentile(of, at)) for name, at in (("p50", 50), ("p99", 99), ("max", 100))}


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Yields a list of delays with which the loop wakes a timer, in milliseconds, measured every 5 ms inside the
    block."""
    found: list[float] = []

    async def watch() -> None:
        while True:
            due = now() + 0.005
            await asyncio.sleep(0.005)
            found.append(1e3 * (now() - due))

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.wait({watching})


class Stand:
    """A run's manager with its client and proxy, and one of `sides.HOOKS`."""

    def __init__(self, config: Config, url: str, side: str, prompt: int):
        """Creates the manager. `prompt`: length of the prompts in tokens."""
        self.config, self.side = config, side
        tokenizer = sides.tokenizer()
        self.client = GenerationClient(url, ModelShape(vocab_size=2000), 3600.0)
        self.proxy = ChatProxy(context=2**20)
        self.late: list[float] = []
        """Seconds after its deadline at which each rollout ended."""
        self.maker = GroupMaker(
            config, Hooks(self._timed, None, None), {ACTOR: PolicyClient(self.client, tokenizer)}, proxy=self.proxy
        )
        text = "q" * (prompt - 10)  # the template adds so many
        prompts = [Prompt(id=f"p{n}", messages=[{"role": "user", "content": text}]) for n in range(10_000)]
        self.prompt = prompts[0]
        self.manager = RolloutManager(config, InOrder(prompts, 1), self.maker)
        self.rollouts = 0
        """Number of complete rollouts so far."""

    async def _timed(self, ctx: RolloutContext, prompt: Prompt) -> Any:
        due = now() + self.config.rollout.rollout_deadline
        try:
            out = await sides.HOOKS[self.side](ctx, prompt)
        except asyncio.CancelledError:
            self.late.append(now() - due)
            raise
        self.rollouts += 1
        return out

    async def go_on(self) -> None:
        """Takes batch after batch."""
        while True:
            await self.manager.next_batch()

    async def stop(self) -> None:
        """Cancels all rollouts in flight."""
        await self.manager.stop()

    async def __aenter__(self) -> Stand:
        await self.client.__aenter__()
        sides.CLIENT[:] = [aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await sides.CLIENT[0].close()
        await self.proxy.stop()
        await self.client.__aexit__(None, None, None)


class PlainStand:
    """One task per rollout in flight, each of which makes one rollout after the other."""

    def __init__(self, config: Config, url: str, count: int, prompt: int):
        of = sides.tokenizer()
        self.url, self.count, self.rollouts = url, count, 0
        self._requests = config.rollout.concurrency
        self._prompt = of("q" * prompt, add_special_tokens=False).input_ids
        self._result = of("r" * sides.RESULT, add_special_tokens=False).input_ids

    async def go_on(self) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=self._requests)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            places = asyncio.Semaphore(self._requests)
            await asyncio.gather(*(self._work(session, places, number) for number in range(self.count)))

    async def _work(self, session: aiohttp.ClientSession, places: asyncio.Semaphore, number: int) -> None:
        again = 0
        while True:
            seed = 1000 * number + again
            await sides.plain(session, places, self.url, self._prompt, list(self._result), seed)
            self.rollouts += 1
            again += 1

    async def stop(self) -> None: ...

    async def __aenter__(self) -> PlainStand:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@asynccontextmanager
async def standing(
    side: str, count: int, prompt: int, seconds: float, **rollout: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """Yields the driver of one side, and the engine, which answers in `seconds`."""
    engine = Engine(sides.answer_ids(sides.tokenizer()), SLOTS, seconds)
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(Path(directory), count, **rollout)
        async with engine.canned(sides.canned_answer()) if side == "client" else engine.served() as url:
            made: Any
            if side == "client":
                made = sides.ClientStand(url, count, prompt)
            elif side == "plain":
                made = PlainStand(config, url, count, prompt)
            else:
                made = Stand(config, url, side, prompt)
            async with made as stand:
                yield stand, engine


async def until(true: Callable[[], bool]) -> None:
    """Waits until `true()`, for events that the benchmark itself causes."""
    async with asyncio.timeout(3600):
        while not true():
            await asyncio.sleep(0.02)


async def throughput(side: str, count: int, prompt: int, window: float) -> dict[str, Any]:
    """Measures one side: starts all rollouts, measures a window of time, and cancels all."""
    async with standing(side, count, prompt, ENGINE_S) as (stand, engine):
        before = asyncio.all_tasks()
        with frozen_heap():
            work = asyncio.create_task(stand.go_on())
            await asyncio.sleep(WARMUP_S)
            async with lag() as late:
                began, done, rollouts, cpu = now(), engine.done, stand.rollouts, sum(os.times()[:2])
                await asyncio.sleep(window)
                spent, requests, rollouts = now() - began, engine.done - done, stand.rollouts - rollouts
                cpu = sum(os.times()[:2]) - cpu
            waiting, tasks = sides.PLAN.waiting, len(asyncio.all_tasks() - before)
            began = now()
            work.cancel()
            await asyncio.wait({work})
            await stand.stop()
            ended = now() - began
            served = {task for task in asyncio.all_tasks() - before if "RequestHandler" in repr(task.get_coro())}
            left = len(asyncio.all_tasks() - before - served)  # the servers' own, one for each connection, end later
            await until(lambda: engine.open == 0)
    if not requests:
        raise SystemExit(f"throughput: no request ended within {window:g} s; give --window more")
    rate = requests / spent
    return {
        "share": rate / (SLOTS / ENGINE_S),
        "rate": rate,
        "rollouts": rollouts / spent,
        "cpu_ms_request": 1e3 * cpu / requests,
        "cpu_ms_rollout": 1e3 * cpu / max(1, rollouts),
        "lag_ms": spread(late),
        "waiting": waiting,
        "tasks": tasks,
        "cancelled_s": ended,
        "left": left + sides.PLAN.waiting,
    }


def anonymous() -> float:
    """Returns the anonymous memory of this process in kB."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1.024


async def memory(side: str, count: int, prompt: int) -> dict[str, float]:
    """Returns the kB of each rollout that waits in its last turn."""
    plan = sides.PLAN
    async with standing(side, count, prompt, 0.01) as (stand, _):
        if side != "plain":  # what the first one brings along
            plan.hold = False
            await stand.maker.make(stand.prompt, group_id="g", number=0)
        plan.hold = True
        with frozen_heap():
            before = anonymous()
            work = asyncio.create_task(stand.go_on())
            await until(lambda: plan.holding == count)
            after = anonymous()
            work.cancel()
            await asyncio.wait({work})
    tokens = prompt + plan.turns * sides.ANSWER + (plan.turns - 1) * sides.RESULT
    return {"kb": (after - before) / count, "tokens": tokens}


async def deadlines(side: str, count: int, prompt: int, seconds: float) -> dict[str, Any]:
    """Returns the delays with which rollouts end after their deadlines, if their groups start over `seconds`."""
    sides.PLAN.turns, sides.PLAN.hold = 1, True
    settings = {"rollout_deadline": DEADLINE_S, "concurrency": count}  # no deadline stands still
    async with standing(side, count, prompt, 0.01, **settings) as (stand, _):
        with frozen_heap():
            async with lag() as late:
                groups = []
                for number in range(count // GROUP):
                    made = stand.maker.make(stand.prompt, group_id=f"g{number}", number=number)
                    groups.append(asyncio.create_task(made))
                    if seconds:
                        await asyncio.sleep(seconds * GROUP / count)
                outcomes = await asyncio.gather(*groups)
    reasons = {outcome.reason for outcome in outcomes}
    if len(stand.late) != count or reasons != {"generate deadline"}:
        raise SystemExit(f"{len(stand.late)} of {count} rollouts were ended, and groups for {reasons}")
    ms = 1e3 * np.array(stand.late)
    return {"early_ms": float(max(0.0, -ms.min())), "late_ms": spread(ms), "lag_ms": spread(late)}


def _child(work: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[Any, ...], scale: float, out: Any) -> None:
    sides.PLAN.scale = scale
    with asyncio.Runner(loop_factory=QuietLoop) as runner:
        out.put(runner.run(work(*arguments)))


def apart(work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, scale: float = 1.0) -> Any:
    """Runs a coroutine function in a new process; returns its result."""
    context = multiprocessing.get_context("forkserver")  # one import for all of them
    context.set_forkserver_preload(["slimx.orchestration.lifetime.garbage", "slimx.rollout.flow.rollouts"])
    out = context.SimpleQueue()
    process = context.Process(target=_child, args=(work, arguments, scale, out))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"a process of the benchmark ended with status {process.exitcode}")
    return out.get()


def main() -> int:
    parser = argparse.ArgumentParser(description="rollouts that wait for tools")
    parts = ("throughput", "memory", "deadlines")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    known = (*sides.HOOKS, *sides.BESIDE)
    parser.add_argument("--sides", nargs="+", choices=known, default=known)
    parser.add_argument("--count", type=positive, default=2000, help="rollouts in flight")
    parser.add_argument(
        "--counts", type=positive, nargs="+", default=[500, 1000, 2000], help="memory: rollouts that wait"
    )
    parser.add_argument("--rounds", type=positive, default=2, help="throughput: turns of each side")
    parser.add_argument("--window", type=positive_float, default=60.0, help="throughput: seconds that are measured")
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of a prompt")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    count, prompt = arguments.count, arguments.prompt
    found: dict[str, list[dict[str, Any]]] = {}

    def keep(part: str, row: dict[str, Any]) -> None:
        found.setdefault(part, []).append(row)
        print(part, json.dumps(row), flush=True)

    if "throughput" in arguments.only:
        for number in range(arguments.rounds):
            for side in arguments.sides if number % 2 == 0 else reversed(arguments.sides):
                keep("throughput", {"side": side} | apart(throughput, side, count, prompt, arguments.window))
        print("\n".join(sides.above_plain(found["throughput"])))
    if "memory" in arguments.only:
        for side in (side for side in arguments.sides if side != "client"):
            for waiting in arguments.counts:
                row = {"side": side, "count": waiting} | apart(memory, side, waiting, prompt, scale=0.01)
                keep("memory", row)
    if "deadlines" in arguments.only:
        for side in (side for side in arguments.sides if side in sides.HOOKS):
            for seconds in (SPREAD_S, 0.0):
                keep("deadlines", {"side": side, "spread_s": seconds} | apart(deadlines, side, count, prompt, seconds))
    missed = [row for row in found.get("throughput", []) if row["share"] < THROUGHPUT_GOAL]
    missed += [row for row in found.get("memory", []) if row["count"] >= GOAL_COUNT and row["kb"] > MEMORY_GOAL]
    print(f"goals: {'missed by ' + ', '.join(row['side'] for row in missed) if missed else 'met'}")
    where = f"{surroundings('slimx', 'aiohttp', 'numpy')}; load {os.getloadavg()[0]:.0f}"
    print(where)
    if arguments.json:
        arguments.json.write_text(json.dumps({"where": where, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
