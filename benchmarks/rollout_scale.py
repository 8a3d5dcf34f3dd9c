"""CPU time of rollouts on Ray's workers, of the driver and of Ray itself, against a plain pool of aiohttp actors.

    python benchmarks/rollout_scale.py [--only scale shared shapes waiting] [--workers 1 2 4 8]
                                       [--sides slimx driver plain] [--steps 3] [--json FILE]

scale    CPU time per request and per sampled token with 1, 2, 4, 8 workers, each with `--rate` requests a second: of
         the workers, of the driver, and of Ray's own processes. efficiency: CPU time per request of one worker, of all
         processes but the engines, divided by that of several
shared   the same if they share the work of the largest number: each wakes up for fewer answers at once
shapes   other numbers of turns and other lengths of answers, by one worker at about half a core, and the load that
         slimx.extras.rollout_workers.load predicts for them
waiting  `--count` rollouts in flight, most of which wait for a tool: the same figures, and memory

Each rollout sends a request to an engine, waits for a tool, and repeats; then two rewards are computed. The engine is a
process that answers at an exact rate over loopback (rollout_scale_engine.py), Ray is real, and the slimx side records
what a run records: saved rollouts, metrics, samples. The plain side returns the same columns to the driver as NumPy
arrays, and records nothing (rollout_scale_sides.py).

CPU time is user and system time of the processes, so the figures hold on a busy machine. The engine is no part of it.
A step is measured from one batch to the next while the next rollouts are in flight."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from machine import surroundings
from quantities import positive, positive_float
from rollout_scale_cpu import Usage, measure, memory_of
from rollout_scale_engine import EnginePool, engine_processes
from rollout_scale_job import Job
from rollout_scale_sides import GROUP, SIDES, Setting, make_config
from rollout_scale_table import describe, fits

from slimx.cluster.connection import start_ray, stop_ray
from slimx.errors import SlimxError
from slimx.orchestration.lifetime.garbage import frozen_heap

PARTS = ("scale", "shared", "shapes", "waiting")
SHAPES = ((1, 64, 0), (1, 1024, 0), (4, 64, 0), (4, 512, 0), (20, 64, 0), (1, 512, 48))
"""Turns, tokens of an answer, and layers whose experts the engines return, of the shapes part."""
SHAPES_LOAD = 4
"""Times the requests per worker of the scale part that the one worker of the shapes part has: about half a core."""
SLOTS = 32
"""Concurrent requests of the engines per worker."""
IDLE_S = 3.0
"""Seconds over which the CPU time of Ray without work is measured."""


class Stand:
    """Settings and directories of all measurements of one call."""

    def __init__(self, root: Path, arguments: argparse.Namespace):
        self.root = root
        self.arguments = arguments
        self.job = Job(turns=arguments.turns, answer=arguments.answer, wait=arguments.wait)
        self._number = 0

    def setting(self, workers: int, times: int, job: Job | None = None) -> Setting:
        """Returns a setting for `workers` workers with the work of `times` workers."""
        self._number += 1
        directory = self.root / str(self._number)
        directory.mkdir()
        groups = self.arguments.groups * times
        return Setting(
            job=job or self.job,
            url="",
            waiting=2 * GROUP * groups,
            per_step=groups,
            workers=workers,
            requests=2 * SLOTS * times,
            directory=directory,
        )

    def settings(self, part: str) -> Iterator[tuple[str, Setting, float]]:
        """Yields the measurements of a part: side, setting, and requests a second of the engines."""
        numbers, rate = self.arguments.workers, self.arguments.rate
        most = max(numbers)
        for side in self.arguments.sides:
            if part == "scale":
                for workers in numbers if side != "driver" else [1]:
                    yield side, self.setting(workers, workers), rate * workers
            elif part == "shared":
                for workers in numbers if side != "driver" else [1]:
                    yield side, self.setting(workers, most), rate * most
            elif part == "shapes":
                for turns, answer, layers in SHAPES:
                    job = replace(self.job, turns=turns, answer=answer, layers=layers)
                    yield side, self.setting(1, SHAPES_LOAD, job), rate * SHAPES_LOAD
            else:
                waits = self.arguments.count / (rate * most)
                waiting = self.setting(most, most, replace(self.job, wait=waits))
                yield side, replace(waiting, waiting=self.arguments.count), rate * most

    async def run(self, part: str, side: str, setting: Setting, rate: float) -> dict[str, Any]:
        """Returns the figures of a measurement."""
        slots = setting.requests // 2
        with engine_processes(1, slots, slots / rate, setting.job.layers) as engines:
            setting = replace(setting, url=engines.url)
            if part == "waiting":
                return await run_waiting(side, setting, engines, self.arguments.window)
            return await run_steps(side, setting, engines, self.arguments.steps, self.arguments.warmup)


async def run_steps(side: str, setting: Setting, engines: EnginePool, steps: int, warmup: int) -> dict[str, Any]:
    """Returns the figures of `steps` steps, which follow `warmup` steps."""
    async with SIDES[side](setting) as running:
        with frozen_heap():
            for _ in range(warmup):
                await running.next_step()
            before, began = measure(engines.pids, engines.done(), running.workers), time.perf_counter()
            rollouts = 0
            for _ in range(steps):
                rollouts += await running.next_step()
            spent = measure(engines.pids, engines.done(), running.workers).since(before)
            seconds = time.perf_counter() - began
        driver_mb, workers_mb = memory_of(running.workers)
    return row_of(side, setting, spent, rollouts, steps, seconds) | {"driver_mb": driver_mb, "workers_mb": workers_mb}


async def run_waiting(side: str, setting: Setting, engines: EnginePool, window: float) -> dict[str, Any]:
    """Returns the figures of `window` seconds, which begin when every rollout has been answered once."""
    async with SIDES[side](setting) as running:
        with frozen_heap():
            work = asyncio.create_task(running.next_step())
            while engines.done() < setting.waiting and not work.done():
                await asyncio.sleep(0.2)
            before, began = measure(engines.pids, engines.done(), running.workers), time.perf_counter()
            await asyncio.sleep(window)
            spent = measure(engines.pids, engines.done(), running.workers).since(before)
            seconds = time.perf_counter() - began
            driver_mb, workers_mb = memory_of(running.workers)
            began = time.perf_counter()
            work.cancel()
            await asyncio.wait({work})
    row = row_of(side, setting, spent, 0, 1, seconds)
    ended = time.perf_counter() - began
    return row | {"driver_mb": driver_mb, "workers_mb": workers_mb, "ended_s": ended}


def row_of(side: str, setting: Setting, spent: Usage, rollouts: int, steps: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of one measurement."""
    job, requests = setting.job, max(1.0, spent.requests)
    total = spent.driver + spent.workers + spent.ray
    return {
        "side": side,
        "workers": setting.workers,
        "waiting": setting.waiting,
        "turns": job.turns,
        "answer": job.answer,
        "layers": job.layers,
        "length": job.length,
        "sent": job.sent,
        "rollouts": rollouts,
        "requests": spent.requests,
        "seconds": seconds,
        "rate": spent.requests / seconds,
        "cpu": asdict(spent),
        "ms_request": {name: 1e3 * getattr(spent, name) / requests for name in ("driver", "workers", "ray")}
        | {"all": 1e3 * total / requests},
        "us_token": 1e6 * total / requests / job.answer,
        "driver_ms_rollout": 1e3 * spent.driver / max(1, rollouts),
        "received_step": spent.received / steps,
        "objects_step": spent.objects / steps,
        "object_bytes_step": spent.object_bytes / steps,
        "load": os.getloadavg()[0],
    }


async def idle() -> float:
    """Returns the share of a core that Ray's processes use without work."""
    before = measure((), 0, "none")
    await asyncio.sleep(IDLE_S)
    return measure((), 0, "none").since(before).ray / IDLE_S


@contextmanager
def cluster(stand: Stand) -> Iterator[None]:
    """Starts Ray inside the block."""
    start_ray(make_config(stand.setting(max(stand.arguments.workers), 1)), "cpu", trainers=False)
    try:
        yield
    finally:
        stop_ray()


def main() -> int:
    parser = argparse.ArgumentParser(description="rollouts on workers")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=positive, default=3, help="steps that are measured")
    parser.add_argument("--warmup", type=positive, default=2, help="steps before them")
    parser.add_argument("--groups", type=positive, default=8, help=f"groups of {GROUP} rollouts in a step, per worker")
    parser.add_argument("--turns", type=positive, default=4, help="requests of a rollout")
    parser.add_argument("--answer", type=positive, default=64, help="tokens of an answer")
    parser.add_argument("--wait", type=positive_float, default=1.0, help="mean seconds of a tool")
    parser.add_argument(
        "--rate", type=positive_float, default=40.0, help="requests a second of the engines, per worker"
    )
    parser.add_argument("--count", type=positive, default=20_000, help="waiting: rollouts in flight")
    parser.add_argument("--window", type=positive_float, default=30.0, help="waiting: seconds that are measured")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as directory:
        stand = Stand(Path(directory), arguments)
        with cluster(stand):
            found["idle"] = asyncio.run(idle())
            for part in arguments.only:
                found[part] = []
                for side, setting, rate in stand.settings(part):
                    row = asyncio.run(stand.run(part, side, setting, rate))
                    print(part, json.dumps(row), file=sys.stderr, flush=True)
                    found[part].append(row)
                print(describe(part, found[part], found["idle"]), end="\n\n")
    print("\n".join(fits({part: found[part] for part in arguments.only})))
    where = f"{surroundings('slimx', 'aiohttp', 'ray', 'numpy')}; load {os.getloadavg()[0]:.0f}"
    print(where)
    if arguments.json:
        arguments.json.write_text(json.dumps({"where": where, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlimxError as error:
        sys.exit(f"benchmarks/rollout_scale.py: {error}")
