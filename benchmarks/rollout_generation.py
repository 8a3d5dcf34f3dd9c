"""Compares generation through slimx's hooks, router and buffer with a bare HTTP client of the same server.

    A  RolloutManager.next_batch: prompts, the generate hook, rewards in their threads, groups in order; requests go
       through sglang-router
    B  the same requests, posted all at once by plain aiohttp to the server itself (benchmarks/bare_engine.py)

They alternate, A B B A A B ..., and must sample the same number of tokens. The figure is B's time over A's, pair by
pair."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import bare_engine
import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.engines.server.keys import bearer
from slimx.errors import SlimxError
from slimx.extras.generation.serving import serving
from slimx.models.families import configured_model
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.start.prepare import check_sources
from slimx.orchestration.start.prompts import make_source
from slimx.rollout.flow.manager import RolloutManager

GOAL = 0.95
"""Smallest accepted share of the bare client's throughput."""
WARMUP = 2
OVERRIDES = (
    "rollout.prompts_per_step=64",
    "rollout.group_size=8",
    "rollout.concurrency=512",  # all of a step at once, as B does
    "rollout.sampling.max_new_tokens=32",
    "rollout.generate=loop_hooks.generate",
    "reward.function=loop_hooks.reward",
)


async def measure(config: Config, pairs: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Starts engines and returns the result of `compare`."""
    sources = check_sources(config, configured_model(config), "cpu")
    async with serving(config, sources, Path(config.run.dir), note) as service:
        return await compare(service, pairs)


async def compare(service: EngineService, pairs: int) -> dict[str, Any]:
    """Returns the seconds of both sides by pair, and the number of tokens that each sampled."""
    config, sources = service.config, service.sources
    sides = Sides(
        service.groups[ACTOR].engines[0].url, service.groups[ACTOR].keys.api_key, config.rollout.request_deadline
    )
    manager = RolloutManager(config, make_source(config, sources.by_source), service.make_maker())
    seconds: dict[str, list[float]] = {"slimx": [], "bare": []}
    try:
        for number in range(WARMUP + pairs):
            order = ("slimx", "bare") if number % 2 == 0 else ("bare", "slimx")
            for side in order:
                spent = await (sides.slimx(service, manager) if side == "slimx" else sides.bare())
                if number >= WARMUP:
                    seconds[side].append(spent)
    finally:
        await manager.stop()
    return {"seconds": seconds, "rollouts": len(sides.requests), "tokens": sides.tokens}


class Sides:
    """Runs a timed batch by either side; the bare side repeats slimx's last requests."""

    def __init__(self, url: str, api_key: str | None, deadline_s: float):
        self.url, self.api_key, self.deadline_s = url, api_key, deadline_s
        self.requests: list[bare_engine.Request] = []
        self.tokens = 0

    async def slimx(self, service: EngineService, manager: RolloutManager) -> float:
        """Returns the seconds of a batch through slimx."""
        began = time.perf_counter()
        batch = await service.watched(manager.next_batch())
        spent = time.perf_counter() - began
        self.requests = bare_engine.requests_of(batch.groups)
        self.tokens = sum(len(t.sampled_ids()) for group in batch.groups for t in group.trajectories)
        return spent

    async def bare(self) -> float:
        """Returns the seconds of the same requests by plain aiohttp."""
        # A connection per request: the server closes idle ones after 5 s, which is between two rounds.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=self.deadline_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=bearer(self.api_key)) as session:
            began = time.perf_counter()
            answers = await bare_engine.generate(session, self.url, self.requests)
            spent = time.perf_counter() - began
        if (sampled := bare_engine.sampled(answers)) != self.tokens:
            raise SlimxError(f"the bare client sampled {sampled} tokens, slimx {self.tokens}")
        return spent


def describe(found: dict[str, Any]) -> str:
    """Returns the throughputs, and their ratio with its spread."""
    slimx, bare = (np.array(found["seconds"][side]) for side in ("slimx", "bare"))
    ratios = bare / slimx
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return "\n".join(
        [
            f"generation of {found['rollouts']} rollouts, {found['tokens']:,} tokens",
            f"{'slimx (hooks, router, buffer)':<32}{found['tokens'] / np.median(slimx):>10,.0f} tokens/s",
            f"{'bare client, same server':<32}{found['tokens'] / np.median(bare):>10,.0f} tokens/s",
            f"slimx / bare: {middle:.3f}, the median of {len(ratios)} pairs; quartiles {low:.3f} to {high:.3f}, range "
            f"{ratios.min():.3f} to {ratios.max():.3f}; goal at least {GOAL}: {'met' if middle >= GOAL else 'missed'}",
        ]
    )
