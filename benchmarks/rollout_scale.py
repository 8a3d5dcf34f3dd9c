"""CPU time of rollouts on Ray's workers, of the driver and of Ray itself, against a plain pool of aiohttp actors.

    python benchmarks/rollout_scale.py [--only scale shapes waiting] [--workers 1 2 4 8] [--sides slimx plain]
                                       [--steps 3] [--json FILE]

scale    CPU time per request and per sampled token with 1, 2, 4, 8 workers: of the workers, of the driver, and of
         Ray's own processes. efficiency: CPU time per request of one worker, of all processes but the engines, divided
         by that of several
shapes   the same with other numbers of turns and other lengths of answers, by one worker; the cost of a rollout, a
         request and a token that follow from it; and the load that slimx.extras.rollout_workers.load predicts
waiting  `--count` rollouts in flight, most of which wait for a tool: the same figures, and memory

Each rollout sends a request to an engine, waits for a tool, and repeats; then two rewards are computed. Engines are
processes that answer at an exact rate over loopback (rollout_scale_engine.py), Ray is real, and the slimx side records
what a run records: saved rollouts, metrics, samples. The plain side returns the same columns to the driver as NumPy
arrays, and records nothing (rollout_scale_sides.py).

CPU time is user and system time of the processes, so the figures hold on a busy machine. Engines are not part of it.
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
from rollout_scale_table import describe_scale, describe_shapes, describe_waiting

from slimx.cluster.connection import start_ray, stop_ray
from slimx.errors import SlimxError
from slimx.orchestration.lifetime.garbage import frozen_heap

SHAPES = ((1, 64), (1, 1024), (4, 64), (20, 64))
"""Turns, and tokens of an answer, of the shapes part."""
IDLE_S = 3.0
"""Seconds over which the CPU time of Ray without work is measured."""


async def run_side(side: str, setting: Setting, engines: EnginePool, steps: int, warmup: int) -> dict[str, Any]:
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


def row_of(side: str, setting: Setting, spent: Usage, rollouts: int, steps: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of one measurement."""
    job, requests = setting.job, max(1.0, spent.requests)
    total = spent.driver + spent.workers + spent.ray
    return {
        "side": side,
        "workers": setting.workers,
        "turns": job.turns,
        "answer": job.answer,
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


async def idle(engines: EnginePool) -> float:
    """Returns the share of a core that Ray's processes use without work."""
    before = measure(engines.pids, 0, "none")
    await asyncio.sleep(IDLE_S)
    return measure(engines.pids, 0, "none").since(before).ray / IDLE_S


@contextmanager
def cluster(root: Path, setting: Setting) -> Iterator[None]:
    """Starts Ray inside the block."""
    (root / "ray").mkdir()
    start_ray(make_config(replace(setting, directory=root / "ray")), "cpu", trainers=False)
    try:
        yield
    finally:
        stop_ray()


def main() -> int:
    parser = argparse.ArgumentParser(description="rollouts on workers")
    parts = ("scale", "shapes", "waiting")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=positive, default=3, help="steps that are measured")
    parser.add_argument("--warmup", type=positive, default=2, help="steps before them")
    parser.add_argument("--groups", type=positive, default=32, help=f"groups of {GROUP} rollouts in a step")
    parser.add_argument("--turns", type=positive, default=4, help="requests of a rollout")
    parser.add_argument("--answer", type=positive, default=64, help="tokens of an answer")
    parser.add_argument("--wait", type=positive_float, default=1.0, help="mean seconds of a tool")
    parser.add_argument("--rate", type=positive_float, default=200.0, help="requests a second of all engines")
    parser.add_argument("--engines", type=positive, default=2, help="processes of engines")
    parser.add_argument("--count", type=positive, default=20_000, help="waiting: rollouts in flight")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, Any] = {}
    slots = 64
    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as directory:
        root = Path(directory)
        job = Job(turns=arguments.turns, answer=arguments.answer, wait=arguments.wait)
        seconds = slots * arguments.engines / arguments.rate
        with engine_processes(arguments.engines, slots, seconds) as engines:
            base = Setting(
                job=job,
                url=engines.url,
                waiting=2 * GROUP * arguments.groups,
                per_step=arguments.groups,
                workers=1,
                requests=2 * slots * arguments.engines,
                directory=root,
            )

            def take(part: str, side: str, setting: Setting) -> None:
                setting.directory.mkdir()
                row = asyncio.run(run_side(side, setting, engines, arguments.steps, arguments.warmup))
                found.setdefault(part, []).append(row)
                print(part, json.dumps(row), file=sys.stderr, flush=True)

            def at(name: str) -> Path:
                return root / f"{name}-{sum(len(rows) for rows in found.values() if isinstance(rows, list))}"

            with cluster(root, base):
                found["idle"] = asyncio.run(idle(engines))
                if "scale" in arguments.only:
                    for workers in arguments.workers:
                        for side in arguments.sides:
                            take("scale", side, replace(base, workers=workers, directory=at("scale")))
                    print(describe_scale(found["scale"], found["idle"]), end="\n\n")
                if "shapes" in arguments.only:
                    for turns, answer in SHAPES:
                        shape = replace(job, turns=turns, answer=answer)
                        for side in arguments.sides:
                            take("shapes", side, replace(base, job=shape, directory=at("shapes")))
                    print(describe_shapes(found["shapes"]), end="\n\n")
                if "waiting" in arguments.only:
                    waits = arguments.count / arguments.rate
                    for side in arguments.sides:
                        many = replace(base, job=replace(job, wait=waits), waiting=arguments.count)
                        many = replace(many, workers=max(arguments.workers), directory=at("waiting"))
                        take("waiting", side, many)
                    print(describe_waiting(found["waiting"], arguments.count), end="\n\n")
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
