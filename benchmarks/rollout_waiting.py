"""Rollouts that wait for tools, thousands at once on one driver: throughput, memory, cancellation and deadlines.

    python benchmarks/rollout_waiting.py [--only throughput memory deadlines] [--rounds 2] [--scale 0.1] [--json FILE]

throughput  requests a second at an engine of an exact rate (benchmarks/waiting_engine.py) with `--count` rollouts in flight,
            each of which calls it and then waits 0.1 to 30 s for a tool, turn after turn: through a hook, through
            slimx.rollout.tools, through agents at the proxy, and by plain asyncio (benchmarks/waiting_sides.py). The
            sides take turns. Each ends by cancelling all, which is timed
memory      anonymous memory of the driver for each rollout that waits, in a process of its own for each figure
deadlines   how late rollouts are ended at `rollout.rollout_deadline`, all at the same moment or spread over seconds
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import waiting_sides as sides
from machine import cpu_seconds, surroundings
from rollout_buffer import InOrder
from waiting_engine import engine

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.data.records import Prompt
from slimx.orchestration.lifetime.heap import settled_heap
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import RolloutContext
from slimx.rollout.proxy.server import ChatProxy

ROOT = Path(__file__).parents[1]
GROUP, AHEAD = 8, 4
"""Rollouts of a group; steps of half the rollouts in flight each that are open, so that as many as may be are in flight."""
SLOTS, ENGINE_S = 128, 1.28
"""The engine's slots, and seconds of an answer: 100 requests a second."""
FAST_S = 0.16
"""Seconds of an answer where the engine is not what is measured."""
DEADLINE_S, SPREAD_S = 10.0, 10.0
"""`rollout.rollout_deadline` of the deadlines part, and the seconds over which groups begin."""
THROUGHPUT_GOAL, MEMORY_GOAL = 0.95, 100.0
"""Share of the engine's rate; kB a rollout."""
PROMPT_ID = "p"


def make_config(directory: Path, rollouts: int, **rollout: Any) -> Config:
    """A run with `rollouts` in flight."""
    overrides = {
        "prompts_per_step": max(1, rollouts // GROUP // 2),
        "group_size": GROUP,
        "max_rollouts": rollouts,
        "concurrency": rollouts,
        "max_failed_share": 1.0,
        "rollout_deadline": 3600,
        "generate": "waiting_sides.hook",
    } | rollout
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            f"run.dir={directory}",
            f"model.path={directory}",
            f"schedule.max_staleness={AHEAD - 1}",
            f"rollout.sampling.max_new_tokens={sides.ANSWER}",
            *(f"rollout.{key}={value}" for key, value in overrides.items()),
        ],
    )


class Lag:
    """Milliseconds by which the event loop woke a timer late."""

    def __init__(self) -> None:
        self.found: list[float] = []

    async def watch(self) -> None:
        """Look every 5 ms."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.005
            await asyncio.sleep(0.005)
            self.found.append(1e3 * (loop.time() - due))

    def told(self) -> dict[str, float]:
        return {name: float(np.percentile(self.found, at)) for name, at in (("p50", 50), ("p99", 99), ("max", 100))}


@asynccontextmanager
async def lag() -> AsyncIterator[Lag]:
    """Watch the event loop inside the block."""
    out = Lag()
    watching = asyncio.create_task(out.watch())
    try:
        yield out
    finally:
        watching.cancel()


class Stand:
    """A run's manager on its client and proxy, with one of `sides.HOOKS`."""

    def __init__(self, config: Config, url: str, side: str, prompt: int):
        """`prompt`: its tokens."""
        self.config, self.side = config, side
        tokenizer = sides.tokenizer()
        self.client = GenerationClient(url, ModelShape(vocab_size=2000), 3600.0)
        self.proxy = ChatProxy(context=2**20)
        self.late: list[float] = []
        """Seconds after its deadline, of each rollout that was ended."""
        hooks = Hooks(self._timed, None, None)
        self.maker = GroupMaker(config, hooks, tokenizer, self.client, proxy=self.proxy)
        text = "q" * (prompt - 9)  # <user>user: <end>\n<assistant> is the rest
        self.prompt = Prompt(id="p", messages=[{"role": "user", "content": text}])
        prompts = [Prompt(id=f"p{n}", messages=self.prompt.messages) for n in range(10_000)]
        self.manager = RolloutManager(config, InOrder(prompts, 1), self.maker)
        self.rollouts = 0
        """That are complete."""

    async def _timed(self, ctx: RolloutContext, prompt: Prompt) -> Any:
        due = asyncio.get_running_loop().time() + self.config.rollout.rollout_deadline
        try:
            out = await sides.HOOKS[self.side](ctx, prompt)
        except asyncio.CancelledError:
            self.late.append(asyncio.get_running_loop().time() - due)
            raise
        self.rollouts += 1
        return out

    async def go_on(self) -> None:
        """Take batch after batch."""
        while True:
            await self.manager.next_batch()

    async def __aenter__(self) -> Stand:
        await self.client.__aenter__()
        sides.CLIENT[:] = [aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.stop()
        await sides.CLIENT[0].close()
        await self.proxy.stop()
        await self.client.__aexit__(None, None, None)


class PlainStand:
    """As many tasks as rollouts, each of which makes one after the other."""

    def __init__(self, url: str, count: int, prompt: int):
        of = sides.tokenizer()
        self.url, self.count, self.rollouts = url, count, 0
        self._prompt = of("q" * prompt, add_special_tokens=False).input_ids
        self._result = of("r" * sides.RESULT, add_special_tokens=False).input_ids

    async def go_on(self) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._work(session, number) for number in range(self.count)))

    async def _work(self, session: aiohttp.ClientSession, number: int) -> None:
        for again in range(10**9):
            await sides.plain(session, self.url, self._prompt, self._result, 1000 * number + again)
            self.rollouts += 1


async def until(true: Callable[[], bool], deadline_s: float = 600.0) -> None:
    """Wait for something that the benchmark itself brings about."""
    async with asyncio.timeout(deadline_s):
        while not true():
            await asyncio.sleep(0.02)


async def done_by(url: str) -> int:
    """Requests that the engine has answered."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/counts") as response:
        return (await response.json())["done"]


async def open_at(url: str) -> int:
    """Requests that the engine has not answered."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/counts") as response:
        return (await response.json())["open"]


async def throughput(side: str, url: str, count: int, prompt: int, warmup: float, window: float) -> dict[str, Any]:
    """One turn of one side: all in flight, a window of time, and the end of all."""
    plan = sides.PLAN
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(Path(directory), count)
        stand: Any = PlainStand(url, count, prompt) if side == "plain" else Stand(config, url, side, prompt)
        async with stand if side != "plain" else _nothing():
            before = asyncio.all_tasks()
            with settled_heap():
                work = asyncio.create_task(stand.go_on())
                await asyncio.sleep(warmup)
                async with lag() as late:
                    began, done, cpu, others = time.perf_counter(), await done_by(url), time.process_time(), cpu_seconds()
                    rollouts = stand.rollouts
                    await asyncio.sleep(window)
                    spent = time.perf_counter() - began
                    requests = await done_by(url) - done
                    cpu, others = time.process_time() - cpu, cpu_seconds() - others
                    rollouts = stand.rollouts - rollouts
                waiting, tasks = plan.waiting, len(asyncio.all_tasks() - before)
                async with lag() as ending:
                    began = time.perf_counter()
                    work.cancel()
                    await asyncio.wait({work})
                    if side != "plain":
                        await stand.manager.stop()
                    ended = time.perf_counter() - began
                left = len(asyncio.all_tasks() - before) - 0
                await until(lambda: plan.waiting == 0, 60)
    await asyncio.sleep(0.5)
    return {
        "rate": requests / spent,
        "rollouts": rollouts / spent,
        "cpu_ms_request": 1e3 * cpu / requests,
        "cpu_ms_rollout": 1e3 * cpu / max(1, rollouts),
        "cores": cpu / spent,
        "others": others / spent,
        "lag_ms": late.told(),
        "waiting": waiting,
        "tasks": tasks,
        "cancelled_s": ended,
        "cancelling_lag_ms": ending.told(),
        "left": left,
        "open": await open_at(url),
    }


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def anonymous() -> float:
    """kB of anonymous memory of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


async def _memory(side: str, url: str, count: int, prompt: int) -> dict[str, float]:
    plan = sides.PLAN
    with tempfile.TemporaryDirectory() as directory:
        # A step is half of what is in flight, so that one of twice as many holds them all.
        config = make_config(Path(directory), count)
        if side == "plain":
            plain = PlainStand(url, count, prompt)
            with settled_heap():
                before = anonymous()
                work = asyncio.create_task(plain.go_on())
                await until(lambda: plan.held == count)
                after = anonymous()
                work.cancel()
                await asyncio.wait({work})
            return {"kb": (after - before) / count}
        async with Stand(config, url, side, prompt) as stand:
            plan.hold = False
            await stand.maker.make(stand.prompt, group_id="g", number=0)  # what the first one brings along
            plan.hold = True
            with settled_heap():
                before = anonymous()
                work = asyncio.create_task(stand.go_on())
                await until(lambda: plan.held == count)
                after = anonymous()
                work.cancel()
                await asyncio.wait({work})
                await stand.manager.stop()
    return {"kb": (after - before) / count}


async def _deadlines(side: str, url: str, count: int, prompt: int, spread: float) -> dict[str, Any]:
    plan = sides.PLAN
    plan.turns, plan.hold = 1, True
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(Path(directory), count, rollout_deadline=DEADLINE_S)
        async with Stand(config, url, side, prompt) as stand:
            with settled_heap():
                async with lag() as late:
                    before, groups = asyncio.all_tasks(), []
                    for number in range(count // GROUP):
                        made = stand.maker.make(stand.prompt, group_id=f"g{number}", number=number)
                        groups.append(asyncio.create_task(made))
                        if spread:
                            await asyncio.sleep(spread * GROUP / count)
                    outcomes = await asyncio.gather(*groups)
                left = len(asyncio.all_tasks() - before)
    reasons = {outcome.reason for outcome in outcomes}
    ms = 1e3 * np.array(stand.late)
    assert len(ms) == count and reasons == {"generate deadline"}, (len(ms), reasons)
    return {
        "early_ms": float(-min(0.0, ms.min())),
        "late_ms": {name: float(np.percentile(ms, at)) for name, at in (("p50", 50), ("p99", 99), ("max", 100))},
        "lag_ms": late.told(),
        "left": left,
    }


def _child(work: Callable[..., Any], arguments: tuple[Any, ...], plan: dict[str, Any], out: Any) -> None:
    for key, value in plan.items():
        setattr(sides.PLAN, key, value)
    out.put(asyncio.run(work(*arguments)))


def apart(work: Callable[..., Any], *arguments: Any, **plan: Any) -> Any:
    """The result of a coroutine function in a process of its own."""
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    process = context.Process(target=_child, args=(work, arguments, plan, out))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"a process of the benchmark ended with status {process.exitcode}")
    return out.get()


@contextmanager
def engines(seconds: float) -> Iterator[str]:
    """URL of an engine that answers with a call, in `seconds`."""
    with engine(sides.answer_ids(sides.tokenizer()), SLOTS, seconds) as url:
        yield url


def main() -> int:
    parser = argparse.ArgumentParser(description="rollouts that wait for tools")
    parts = ("throughput", "memory", "deadlines")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--sides", nargs="+", choices=(*sides.SIDES, "plain"), default=(*sides.SIDES, "plain"))
    parser.add_argument("--count", type=int, default=2000, help="rollouts in flight")
    parser.add_argument("--counts", type=int, nargs="+", default=[500, 1000, 2000], help="memory: rollouts that wait")
    parser.add_argument("--rounds", type=int, default=2, help="throughput: turns of each side")
    parser.add_argument("--scale", type=float, default=1.0, help="throughput: factor of waits and of the engine's seconds")
    parser.add_argument("--window", type=float, default=60.0, help="throughput: seconds that are measured, before --scale")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, Any] = {}
    count, prompt, scale = arguments.count, arguments.prompt, arguments.scale
    if "throughput" in arguments.only:
        rate = SLOTS / (scale * ENGINE_S)
        rows = found["throughput"] = []
        for number in range(arguments.rounds):
            for side in arguments.sides if number % 2 == 0 else reversed(arguments.sides):
                with engines(scale * ENGINE_S) as url:
                    times = scale * 1.5 * sides.LONGEST, scale * arguments.window
                    one = apart(throughput, side, url, count, prompt, *times, scale=scale)
                rows.append({"side": side, "share": one["rate"] / rate} | one)
                print(json.dumps(rows[-1]), file=sys.stderr)
    if "memory" in arguments.only:
        rows = found["memory"] = []
        with engines(FAST_S) as url:
            for side in arguments.sides:
                for each in arguments.counts:
                    kb = apart(_memory, side, url, each, prompt, scale=0.01, hold=True)["kb"]
                    rows.append({"side": side, "count": each, "kb": kb})
                    print(json.dumps(rows[-1]), file=sys.stderr)
    if "deadlines" in arguments.only:
        rows = found["deadlines"] = []
        with engines(FAST_S) as url:
            for side in [each for each in arguments.sides if each != "plain"]:
                for spread in (SPREAD_S, 0.0):
                    one = apart(_deadlines, side, url, count, prompt, spread)
                    rows.append({"side": side, "spread_s": spread} | one)
                    print(json.dumps(rows[-1]), file=sys.stderr)
    where = surroundings("slimx", "aiohttp", "numpy")
    print(where)
    if arguments.json:
        arguments.json.write_text(json.dumps({"where": where, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
