"""Measures a training step by phase, and its overhead over the sum of its parts run separately.

    python benchmarks/loop.py [--pairs 8] [--json FILE]

One run with the real parts: Ray, two megatron-core ranks (expert parallel 2), one SGLang server, sglang-router. In it A
and B alternate, A B B A A B B A ..., so that other work on the machine affects both:

    A  a step of slimx's own loop (slimx.orchestration.loop.train, not a copy), from the end of what was before it to
       the end of its bookkeeping: generate through the router, rewards, advantages, packing, train, publish, record
    B  the same work without slimx, one part after the other:
         engine       the requests of the step before, posted all at once by plain aiohttp to the server itself
         trainer      forward, backward and optimizer step in a plain megatron loop in the trainers' own processes, on
                      the micro-batches of the step before, which lie there as tensors; one bare Ray call
         publication  slimx's Publisher alone, because no simpler implementation verifies what it sends

Both sides sample as many tokens, train the same rows and publish the same weights; the benchmark checks the first two
and stops if they differ. The figure is A / (sum of B), pair by pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import bare_engine
from bare_trainer import BareTrainerWorker
from figures import BareRound, Figures, SlimxStep, describe
from machine import cpu_seconds, surroundings
from quantities import positive
from rich.console import Console
from whole_run import make_records, started

from slimx.cluster.connection import device_of, start_ray, stop_ray
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.records import Group
from slimx.engines.server.keys import bearer
from slimx.errors import SlimxError
from slimx.observability.live.table import LiveTable
from slimx.orchestration import loop
from slimx.orchestration.lifetime.garbage import frozen_heap
from slimx.orchestration.recovery import RankLossHandler
from slimx.orchestration.run import Run
from slimx.orchestration.start.prepare import check_run
from slimx.orchestration.state.saves import Saves

ROOT = Path(__file__).parents[1]
SHORTEST_STEP_S = 3.0
"""Minimum duration of a step, in seconds. In shorter steps, fixed costs would dominate the comparison."""
WARMUP = 2
"""Steps of slimx and rounds of the bare parts that are not counted: the first calls are slow on both sides."""

# A: slimx's loop ----------------------------------------------------------------------------------------------------


class MeasuredRun(Run):
    """slimx's run, timed. The bare parts run between two steps, when the loop would write a checkpoint."""

    def __init__(self, *args: Any, bare: BareParts, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bare, self.figures = bare, Figures()
        self._turned = -1
        self._spent: dict[str, float] = defaultdict(float)
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with super().phase(name):
            yield
        self._spent[name] += time.perf_counter() - began

    async def record(self, metrics: dict[str, float], groups: list[Group], *step: Any) -> None:
        began = time.perf_counter()
        await super().record(metrics, groups, *step)
        self._spent["record"] += time.perf_counter() - began
        self.metrics, self.groups = metrics, groups

    async def save(self) -> None:
        """Ends the timing of a step, and runs the bare parts if it is their turn. Writes no checkpoint."""
        seconds, number = time.perf_counter() - self._began, self.step - WARMUP
        if self.step > self._turned:  # the loop asks again after its last step
            self._turned = self.step
            if number > 0:
                self.figures.slimx.append(self._step(seconds))
            # Pair 1 is A B, pair 2 is B A: after an odd step two rounds in a row, after an even one none.
            last = self.step == self.config.schedule.steps
            rounds = (1 if last else 2) * (number % 2) if number > 0 else 1
            if rounds:
                await self.bare.hold(self)
            for _ in range(rounds):
                done = await self.bare.drive(self)
                if number > 0:
                    self.figures.bare.append(done)
            self.figures.rollouts, self.figures.sampled = len(self.bare.requests), self.bare.tokens
            self.figures.mib = self.metrics["publish/mib"]
        self._spent.clear()
        self._began = time.perf_counter()

    def _step(self, seconds: float) -> SlimxStep:
        phases = dict(self._spent)
        phases["rest"] = seconds - sum(phases.values())
        return SlimxStep(seconds, phases, stages_of(self.metrics))


def stages_of(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the seconds by stage of a publication, from the metrics of its step."""
    return {
        name.removeprefix("publish/").removesuffix("_seconds"): value
        for name, value in metrics.items()
        if name.startswith("publish/") and name.endswith("_seconds")
    }


# B: the parts, driven bare ------------------------------------------------------------------------------------------


class BareParts:
    """Drives the parts without slimx, with the work of slimx's last step."""

    def __init__(self, session: aiohttp.ClientSession):
        self.session = session
        self.requests: list[bare_engine.Request] = []
        self.tokens = 0
        """Number of tokens sampled in slimx's last step."""

    async def hold(self, run: MeasuredRun) -> None:
        """Takes over the requests of slimx's last step, and its micro-batches into the trainers. Not timed."""
        self.requests = bare_engine.requests_of(run.groups)
        self.tokens = sum(len(t.sampled_ids()) for group in run.groups for t in group.trajectories)
        (rows,) = run.updates(run.groups)[ACTOR]
        actor = run.policies[ACTOR]
        batch = actor.packer(rows)
        run.figures.trained = batch.tokens
        await asyncio.gather(
            *(
                rank.hold.remote(shard)
                for rank, shard in zip(actor.trainers.actors, batch.shards, strict=True)  # one rank per shard: DP 2
            )
        )

    async def drive(self, run: MeasuredRun) -> BareRound:
        """Runs one round of all three parts."""
        began = time.perf_counter()
        answers = await bare_engine.generate(self.session, run.policies[ACTOR].engines.engines[0].url, self.requests)
        generated = time.perf_counter()
        norms = await asyncio.gather(*(rank.bare_step.remote() for rank in run.policies[ACTOR].trainers.actors))
        trained = time.perf_counter()
        publication = await run.policies[ACTOR].publications.publisher.publish(run.version, trainer_step=run.step)
        published = time.perf_counter()
        self._check(bare_engine.sampled(answers), norms[0], run.metrics["optim/grad_norm"])
        return BareRound(generated - began, trained - generated, published - trained, publication.seconds)

    def _check(self, tokens: int, norm: float, slimx_norm: float) -> None:
        """Checks that both sides did the same work. The learning rate is so small that the gradient of the same rows
        hardly changes in one step."""
        if tokens != self.tokens:
            raise SlimxError(f"the bare engine sampled {tokens} tokens, slimx's step {self.tokens}")
        if abs(norm - slimx_norm) > 0.01 * slimx_norm:
            raise SlimxError(f"the bare trainer's gradient norm is {norm:.6g}, that of slimx's step {slimx_norm:.6g}")


# The run ------------------------------------------------------------------------------------------------------------


def make_config(directory: Path, pairs: int, prompts: int) -> Config:
    """Returns the quickstart's configuration with larger steps: `prompts` x 8 rollouts x 32 tokens, on the untrained
    model."""
    data = directory / "data"
    tools = ROOT / "slimx/extras/quickstart"
    subprocess.run([sys.executable, tools / "make_model.py", "--out", data / "model"], check=True, stdout=sys.stderr)
    subprocess.run([sys.executable, tools / "make_task.py", "--out", data], check=True, stdout=sys.stderr)
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            "run.name=benchmark",
            f"run.dir={directory / 'run'}",
            f"model.path={data / 'model'}",
            f"trainer.load={data / 'model'}",
            "trainer.optimizer.lr=1e-10",  # the weights stay as they are: every step is the same work
            f"rollout.prompts={data / 'train.jsonl'}",
            f"rollout.prompts_per_step={prompts}",
            "rollout.group_size=8",
            "rollout.concurrency=512",  # all of a step at once, as B does
            "rollout.sampling.max_new_tokens=32",
            "rollout.generate=loop_hooks.generate",
            "reward.function=loop_hooks.reward",
            "algorithm.reference=false",  # a forward pass more, which B does not have
            f"schedule.steps={WARMUP + pairs}",
            "checkpoint.every=1",  # MeasuredRun.save: B's turn
            "eval={prompts: null, every: 0}",
        ],
    )


async def measure(config: Config) -> Figures:
    """Starts the parts of a run, runs the loop and stops everything."""
    prepared = check_run(config)
    config = prepared.policies[ACTOR].config
    directory = Path(config.run.dir)
    async with AsyncExitStack() as stack:
        table = stack.enter_context(LiveTable(config.schedule.steps, 0, Console(stderr=True)))
        starting = started(config, prepared, table.note, BareTrainerWorker)
        trainers, service = await stack.enter_async_context(starting)
        records = make_records(config, prepared, table)
        stack.callback(records.close)
        # A connection per request: the server closes idle ones after 5 s, which is between two rounds.
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=config.rollout.request_deadline),
            headers=bearer(service.groups[ACTOR].keys.api_key),
        )
        await stack.enter_async_context(session)
        saves = Saves(directory / "checkpoints", keep=1)
        run = MeasuredRun(
            service, prepared, {ACTOR: trainers}, records, saves, RankLossHandler(trainers), bare=BareParts(session)
        )
        stack.push_async_callback(run.rollouts.stop)
        stack.enter_context(frozen_heap())  # as the session does
        began = cpu_seconds(), time.perf_counter()
        await loop.train(run)
        run.figures.others = (cpu_seconds() - began[0]) / (time.perf_counter() - began[1])
        return run.figures


def main() -> int:
    parser = argparse.ArgumentParser(description="slimx's step, compared with the sum of its bare parts")
    parser.add_argument("--pairs", type=positive, default=8, help="pairs of a slimx step and a round of the bare parts")
    parser.add_argument("--prompts", type=positive, default=64, help="of a step, 8 rollouts of each")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error(f"--pairs is {arguments.pairs}: a median and its spread need 2 at least")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended as after Ctrl-C
    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as directory:
        config = make_config(Path(directory), arguments.pairs, arguments.prompts)
        start_ray(config, device_of(config))
        try:
            figures = asyncio.run(measure(config))
        finally:
            stop_ray()
    if (median := figures.median_step()) < SHORTEST_STEP_S:
        raise SlimxError(
            f"the median step took {median:.2f} s; one shorter than {SHORTEST_STEP_S} s tells too little: raise "
            "max_new_tokens in make_config, or --prompts"
        )
    print(describe(figures))
    where = surroundings("slimx", "torch", "megatron-core", "sglang", "sglang-router", "ray")
    print(f"other processes used {figures.others:.2f} cores meanwhile; {where}")
    if arguments.json:
        ratios = figures.ratios().tolist()
        arguments.json.write_text(json.dumps({"where": where, "ratios": ratios, **asdict(figures)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlimxError as error:
        sys.exit(f"benchmarks/loop.py: {error}")
