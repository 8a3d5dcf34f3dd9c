"""`slimx generate`: generates the rollouts of `schedule.steps` steps and saves them, without training. Its files:

RUN/rollouts/step-NNNNNNN.groups    rollouts, which `slimx rollouts` shows and `rollout.replay` trains on
RUN/cursor/iter_NNNNNNN/            position in the prompts and waiting groups, from which generation resumes
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from slimx.cluster.connection import device_of
from slimx.cluster.starting import Starting
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of
from slimx.errors import Preempted, counted
from slimx.extras.generation.checks import check_generation
from slimx.extras.generation.serving import serving
from slimx.models.families import configured_model
from slimx.observability.live.safe_text import plain
from slimx.observability.live.table import REWARD, SECONDS, STEP, TOKENS_PER_SECOND, LiveTable, TableColumn
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.orchestration.batches import trajectories_of
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.lifetime.lifetime import Alarm, EndingStack, run_with_ray
from slimx.orchestration.start.prepare import Sources, check_sources
from slimx.orchestration.start.prompts import make_source
from slimx.orchestration.state.directory import begun, unused, write_config
from slimx.orchestration.state.recording import open_tracker
from slimx.orchestration.state.saves import CURSOR, RunState, Saves, read_state
from slimx.orchestration.step.measure import group_metrics
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.tickets import Batch, Dropped
from slimx.runtime.tasks import in_thread

COLUMNS = (
    STEP,
    REWARD,
    TableColumn("tokens", "response/mean_tokens", ".1f"),
    TableColumn("truncated", "response/truncated", ".2f"),
    TableColumn("dropped", "dropped/total", ".0f"),
    TOKENS_PER_SECOND,
    SECONDS,
)


def run_generation(config: Config, console: Console) -> Path:
    """Generates rollouts for the remaining steps and returns the run's directory.

    Checks the configuration, starts engines, and resumes from the position that an earlier call has saved in the
    directory. `config`: a configuration with engines and without trainers (slimx.extras.generation.checks). Raises
    SlimxError if the generation fails; after a signal, raises Preempted if the run has saved its position (SIGUSR1),
    and Interrupted otherwise."""
    device = device_of(config)
    sources = check_sources(config, configured_model(config), device)
    directory = Path(config.run.dir)
    saves = Saves(directory / CURSOR, keep=1)
    check_generation(config, directory, saves)
    newest = saves.newest()
    state = read_state(newest) if newest is not None else None
    if state is not None and state.step >= config.schedule.steps:
        message = f"{directory} is finished after {counted(state.step, 'step')}; raise schedule.steps to continue it"
        console.print(plain(message + unused(config)))
        return directory
    with begun(directory):
        write_config(config, directory)
        starting = Starting.of(config, trainers=False)
        console.print(plain(starting.line))
        work = partial(_session, config, sources, saves, state, starting, console)
        run_with_ray(config, device, work, trainers=False)
    return directory


async def _session(
    config: Config,
    sources: Sources,
    saves: Saves,
    state: RunState | None,
    starting: Starting,
    console: Console,
    alarm: Alarm,
) -> None:
    directory = Path(config.run.dir)
    done = 0
    if state is not None:
        done = state.step
    with LiveTable(config.schedule.steps, done, console, COLUMNS) as table:
        table.start(starting.line, starting.since)
        async with EndingStack(alarm) as stack:
            service = await stack.enter_async_context(serving(config, sources, directory, table.note))
            if state is not None:
                table.note(f"resumed after step {state.step}")
            table.note(starting.ready)
            await generate(service, saves, state, table, alarm.leaving)


async def generate(
    service: EngineService, saves: Saves, state: RunState | None, table: LiveTable, leaving: asyncio.Event
) -> None:
    """Generates the steps that remain after `state` (None: all steps), and saves each before the next one starts.

    `table`: displays the progress. `leaving`: event that is set when the process should save and exit."""
    config = service.config
    sources = service.sources
    step = 0
    if state is not None:
        step = state.step
    current = step
    directory = Path(config.run.dir)
    async with AsyncExitStack() as stack:
        resume_step = step + 1 if step else 0
        tracker = open_tracker(config, resume_step, table.note)
        stack.callback(tracker.close)
        drops = JsonlFile(directory / "dropped.jsonl", resume_step=resume_step)
        stack.callback(drops.close)
        origin = origin_of(config, sources.policies[ACTOR].tokenizer)
        files = StepFiles(directory / DIRECTORY, origin, every=1, keep=0, resume_step=resume_step)

        def drop(dropped: Dropped) -> None:
            drops.write({"step": manager.counting(current, step), **asdict(dropped)})

        source = make_source(config, sources.by_source)
        manager = RolloutManager(config, source, service.make_maker(), drop, service.groups[ACTOR].interrupt)
        stack.push_async_callback(manager.stop)
        if state is not None:
            manager.restore(state.rollouts)
        while step < config.schedule.steps:
            if leaving.is_set():
                raise Preempted(step, config.schedule.steps)
            began = time.perf_counter()
            current = step + 1
            table.phase("generate")
            batch = await service.watched(manager.next_batch())
            seconds = time.perf_counter() - began
            await in_thread(files.write, step + 1, 0, batch.groups, batch.dropped)
            step += 1
            await manager.maker.collect()
            await in_thread(_save, saves, RunState(step, 0, policies={}, rollouts=manager.state()))
            metrics = _metrics(batch, seconds, config.eval.passing)
            tracker.log(step, metrics, version=0)
            table.row(step, metrics)


def _save(saves: Saves, state: RunState) -> None:
    saves.commit(saves.begin(state.step), state.files(), {})


def _metrics(batch: Batch, seconds: float, passing: float) -> dict[str, float]:
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories_of(batch.groups))
    return group_metrics(batch, passing) | {"time/step": seconds, "perf/tokens_per_second": sampled / seconds}
