"""Wall time of a training step, asynchronous against synchronous, where one answer in sixteen is ten times as long.

The same trainer, engine and prompts run `schedule.max_staleness` 0, 1, ... in turns of a few steps of slimx's own loop
(slimx.orchestration.loop.train); every turn begins with nothing in flight and generates the same rollouts. The first
step of a turn, for which nothing was generated ahead, is not counted on either side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rollout_hooks import EVERY, SHORT, SKEW
from whole_run import make_records, started

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.records import Group
from slimx.observability.live.table import LiveTable
from slimx.orchestration import loop
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.lifetime.garbage import frozen_heap
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.recovery import RankLossHandler
from slimx.orchestration.run import Run, StepRows
from slimx.orchestration.start.prepare import Prepared, check_run
from slimx.orchestration.state.saves import Saves

OVERRIDES = (
    "rollout.prompts_per_step=16",
    "rollout.group_size=4",
    "rollout.concurrency=512",
    f"rollout.sampling.max_new_tokens={SHORT * SKEW}",
    "rollout.generate=rollout_hooks.skewed",
    "reward.function=loop_hooks.reward",
    "track.tensorboard=false",
    "algorithm.reference=false",
    "trainer={world_size: 1, expert: 1}",  # a core for it, and one for the engine
)


class TimedRun(Run):
    """slimx's run, which records the seconds of its steps and writes no checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []
        self.waited: list[float] = []
        """Seconds of each step in which the loop only waited for rollouts."""
        self._generated = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with super().phase(name):
            yield
        if name == "generate":
            self._generated += time.perf_counter() - began

    async def record(self, metrics: dict[str, float], groups: list[Group], rows: StepRows, began: float) -> None:
        await self.records.kept()
        self.seconds.append(time.perf_counter() - began)
        await super().record(metrics, groups, rows, began)
        self.waited.append(self._generated)
        self._generated = 0.0

    async def save(self) -> None:
        """Does nothing: a turn has no checkpoints."""


class Turns:
    """Started trainers and engines, which several runs use one after the other."""

    def __init__(self, config: Config, prepared: Prepared, trainers: TrainerGroup, service: EngineService):
        self.config, self.prepared, self.trainers, self.service = config, prepared, trainers, service
        self.done = 0
        """Steps of all turns so far, because versions must keep rising."""

    async def turn(self, staleness: int, steps: int) -> TimedRun:
        """Runs `steps` steps with this bound."""
        base, prepared = self.config, self.prepared
        schedule = base.schedule.model_copy(update={"max_staleness": staleness, "steps": self.done + steps})
        directory = Path(base.run.dir) / f"turn-{self.done:04d}"
        config = base.model_copy(
            update={"schedule": schedule, "run": base.run.model_copy(update={"dir": str(directory)})}
        )
        async with AsyncExitStack() as stack:
            table = stack.enter_context(LiveTable(steps, 0, Console(quiet=True)))
            records = make_records(config, prepared, table)
            stack.callback(records.close)
            service = copy(self.service)  # its engines, under the configuration of this turn
            service.config = config
            saves = Saves(directory / "checkpoints", keep=1)
            run = TimedRun(service, prepared, {ACTOR: self.trainers}, records, saves, RankLossHandler(self.trainers))
            stack.push_async_callback(run.rollouts.stop)
            run.step = self.done
            stack.enter_context(frozen_heap())  # as the session does
            await loop.train(run)
        for engine in self.service.groups[ACTOR].engines:  # what was generated ahead of a step that never comes
            await engine.perform("interrupt", None)
        self.done += steps
        return run


async def measure(config: Config, bounds: Sequence[int], rounds: int, steps: int, note: Any) -> dict[str, Any]:
    """Returns the seconds of each counted step by bound and round."""
    prepared = check_run(config)
    config = prepared.policies[ACTOR].config
    found: dict[str, Any] = {"steps": steps, "seconds": {k: [] for k in bounds}, "waited": {k: [] for k in bounds}}
    async with started(config, prepared, note) as (trainers, service):
        turns = Turns(config, prepared, trainers, service)
        await turns.turn(0, 2)  # first calls are slow
        for number in range(rounds):
            for bound in bounds if number % 2 == 0 else reversed(bounds):
                run = await turns.turn(bound, steps)
                found["seconds"][bound].append(run.seconds[1:])
                found["waited"][bound].append(run.waited[1:])
                note(f"max_staleness {bound}: {' '.join(f'{spent:.2f}' for spent in run.seconds)} s")
    return found


def describe(found: dict[str, Any]) -> str:
    """Returns a row for each bound, with ratios to the synchronous run, round by round."""
    sync = np.array(found["seconds"][0]).mean(1)
    lines = [
        f"steps of 64 rollouts, one in {EVERY} of {SHORT * SKEW} tokens, the others of {SHORT}",
        f"{'max_staleness':<16}{'s per step':>12}{'of it waiting':>15}{'sync / this':>14}  range over rounds",
    ]
    for bound, seconds in found["seconds"].items():
        means = np.array(seconds).mean(1)
        ratios, waited = sync / means, np.array(found["waited"][bound]).mean()
        lines.append(
            f"{bound:<16}{np.median(means):>12.2f}{waited / np.mean(means):>15.0%}{np.median(ratios):>14.2f}  "
            f"{ratios.min():.2f} to {ratios.max():.2f}"
        )
    lines.append(f"{len(sync)} rounds of {found['steps']} steps each, the first of which is not counted")
    return "\n".join(lines)
