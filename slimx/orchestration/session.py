"""From a checked configuration to a finished run: start everything, run the loop, end everything, whatever happens."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from slimx import entry_points
from slimx.algorithms.learner import learner_of
from slimx.cluster.connection import device_of
from slimx.cluster.starting import Starting
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR, prefix_of
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of
from slimx.engines.fleet.handle import kernels_of
from slimx.layout.ranks import Sizes
from slimx.models.families import read_trunk
from slimx.observability.events import Events, open_events
from slimx.observability.live.activity import FILE, Activity
from slimx.observability.live.safe_text import plain
from slimx.observability.live.table import (
    PPO_COLUMNS,
    RL_COLUMNS,
    SFT_COLUMNS,
    LiveTable,
    TableColumn,
    with_policies,
)
from slimx.observability.tracking.run_files import up_to_date
from slimx.orchestration.batches import longest_trajectory, make_packer
from slimx.orchestration.engines.service import EngineService, check_reach
from slimx.orchestration.lifetime.hangs import keep_stacks
from slimx.orchestration.lifetime.heap import settled_heap
from slimx.orchestration.lifetime.lifetime import Alarm, EndingStack, run_with_ray, stopping, together
from slimx.orchestration.loop import train
from slimx.orchestration.ranks.critic import CriticGroup
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.ranks.watch import watch_ranks
from slimx.orchestration.recovery import make_recovery
from slimx.orchestration.run import Run
from slimx.orchestration.start.prepare import Prepared, PreparedPolicy, check_run, make_plans
from slimx.orchestration.start.prompts import check_order
from slimx.orchestration.state.directory import begun, check_start, finished, resume_point, unused, write_config
from slimx.orchestration.state.recording import Records, summary
from slimx.orchestration.state.resume import check_resume, layout_of
from slimx.orchestration.state.saves import Saves, read_state
from slimx.orchestration.step.reference import restore_reference
from slimx.reshard.plan.copy_plan import Plan
from slimx.rollout.flow.replay import check_replay
from slimx.trainer.checkpoint.files import Damaged


def run_training(config: Config, console: Console) -> Path:
    """Check, start, train, stop; returns the run's directory. Raises as `run_session` does."""
    return run_session(config, console, train)


def run_session(config: Config, console: Console, work: Callable[[Run], Awaitable[None]]) -> Path:
    """Check, start everything, do `work`, stop; returns the run's directory.

    Raises SlimxError, Interrupted after a stop, or Preempted after a checkpoint that SIGUSR1 asked for.
    """
    directory = Path(config.run.dir)
    options = config.checkpoint
    saves = Saves(directory / "checkpoints", keep=options.keep, keep_every=options.keep_every)
    check_start(config, directory, saves)  # before models and prompts are read; `resume_point` looks again
    prepared = check_run(config)
    with begun(directory):
        (directory / FILE).unlink(missing_ok=True)  # an earlier process's word, which status would take for this one's
        with open_events(config, partial(_say, console)) as events:
            while True:
                try:
                    _attempt(config, prepared, saves, events, console, work)
                    return directory
                except Damaged as error:
                    _say(console, _pass_over(error, saves, options.damaged))


def _say(console: Console, text: str) -> None:
    console.print(plain(text))


def _attempt(
    config: Config,
    prepared: Prepared,
    saves: Saves,
    events: Events,
    console: Console,
    work: Callable[[Run], Awaitable[None]],
) -> None:
    """Start from the newest checkpoint and do `work`. Raises Damaged if that checkpoint is."""
    directory = Path(config.run.dir)
    resume_from, state = resume_point(config, directory, saves), None
    if resume_from is not None:
        state = read_state(resume_from)
        if finished(config, directory, state):
            sentence = f"{directory} is finished at step {state.step}; raise schedule.steps to go on"
            _say(console, sentence + unused(config))
            return
        check_resume(resume_from, state, prepared.policies, prepared.critic)
        check_order(config, prepared.by_source, state.rollouts, own=resume_from.parent == saves.directory)
    if config.rollout.replay:
        check_replay(
            Path(config.rollout.replay),
            origin_of(config, prepared.policies[ACTOR].tokenizer),
            first=1 if state is None else state.step + 1,
            last=config.schedule.steps,
            routes=config.trainer.moe.routing_replay == "R3",
        )
    write_config(config, directory)
    starting = Starting.of(config)
    _say(console, starting.line)
    parts = partial(_session, config, prepared, saves, resume_from, starting, events, console, work)
    run_with_ray(config, device_of(config), parts)


def _pass_over(error: Damaged, saves: Saves, policy: str) -> str:
    """Set a damaged checkpoint aside for the one before it; returns the message about it. Raises `error` where that
    cannot be: the configuration forbids it, the checkpoint is another run's, or there is no other."""
    own = error.checkpoint.parent == saves.directory
    aside = saves.set_aside(error.checkpoint) if own and policy == "skip" else None
    if aside is None:
        raise error
    return f"{error.about} {error.problem}: the checkpoint is {aside.name} now, and the run goes on from the one before"


async def _session(
    config: Config,
    prepared: Prepared,
    saves: Saves,
    resume_from: Path | None,
    starting: Starting,
    events: Events,
    console: Console,
    work: Callable[[Run], Awaitable[None]],
    alarm: Alarm,
) -> None:
    directory, replayed, actor = Path(config.run.dir), config.rollout.replay, prepared.policies[ACTOR]
    state = read_state(resume_from) if resume_from else None
    done = state.step if state else 0
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    async with EndingStack(alarm, partial(keep_stacks, directory, partial(_say, console))) as stack:
        table = stack.enter_context(
            LiveTable(
                config.schedule.steps,
                done,
                console,
                with_policies(_columns(config), [name for name in prepared.policies if name != ACTOR]),
            )
        )
        records = _open_records(config, table, events, done + 1 if done else 0, actor.tokenizer)
        stack.callback(records.close)
        table.start(starting.line, starting.since)
        if config.publish.transport == "auto" and config.rollout.policy_engines:
            table.note(f"publish.transport {actor.transport}")
        config = actor.config
        device = device_of(config)
        trainers: dict[str, TrainerGroup] = {}
        for name, policy in prepared.policies.items():
            trainers[name] = _trainers(name, policy, device, logs)
            stack.push_async_exit(stopping(trainers[name].stop, table.note))
        critic = None
        if prepared.critic is not None:
            packer = make_packer(config.as_critic(), read_trunk(config.model), prepared.critic)
            critic = CriticGroup(config, prepared.critic, packer, trainers=trainers[ACTOR], log_dir=logs, device=device)
            stack.push_async_exit(stopping(critic.stop, table.note))
        service = EngineService(
            config,
            prepared,
            directory,
            note=table.note,
            record=records.restarted,
            lost=records.engine_lost,
        )
        await stack.enter_async_context(service)
        await start_parts(config, trainers, critic, service, records.starting)
        recovery = make_recovery(trainers[ACTOR], records, logs, partial(_replanned, actor, device))
        stack.push_async_callback(recovery.stop)
        alarm.ring_after(recovery.watch())
        watched: list[RankGroup] = [group for name, group in trainers.items() if name != ACTOR]
        watched += [critic.own] if critic is not None and critic.own is not None else []
        for group in watched:
            alarm.ring_after(watch_ranks(group, group.config.trainer.watch_deadline))
        layouts = [actor.sizes] if prepared.critic is None else [actor.sizes, prepared.critic]
        await service.open(longest_trajectory(config, actor.spec, *layouts))
        for policy in prepared.policies.values():
            for reason in policy.backends.reasons:
                table.note(reason)
        handles = [engine for group in service.groups.values() for engine in group.engines]
        for kernels in dict.fromkeys(kernels_of(engine.attestation) for engine in handles):
            table.note(f"engines: {kernels}")
        if replayed:
            table.note(
                f"replaying {replayed}: no engine is started" + ", nothing is evaluated" * bool(config.eval.files)
            )
        run = Run(service, prepared, trainers, records, saves, recovery, critic=critic, leaving=alarm.leaving)
        run.checkpoints.on_failure = alarm.ring
        stack.push_async_callback(run.rollouts.stop)
        stack.push_async_callback(run.checkpoints.stop)
        await stack.enter_async_context(Activity(directory, run.activity, table.note, watch=events.look))
        for group in service.groups.values():
            group.members.watch()
        if state is not None and resume_from is not None:
            async with run.trainers_turn(publish=False):
                await run.restore(resume_from, state)
                await restore_reference(run, resume_from)
        if (line := resume_line(resume_from, done, records.tracker.removed)) is not None:
            table.note(line)
        same = state is None or state.policies[ACTOR]["layout"] == layout_of(actor.sizes)
        await recovery.open(run.checkpoints, done, resume_from, same_layout=same)
        stack.enter_context(settled_heap())
        table.note(starting.ready)
        await work(run)
        events.tell("finished", f"finished after {run.step} steps")


def resume_line(checkpoint: Path | None, step: int, removed: int) -> str | None:
    """Returns the line about a run that goes on from `checkpoint` after `step` steps; None for one that begins.
    `removed`: lines that its metrics.jsonl had beyond."""
    later = f"; {removed} later or torn lines were taken out of metrics.jsonl" if removed else ""
    if checkpoint is not None:
        return f"resumed at step {step} from {checkpoint}{later}"
    return f"begins again, as it has no checkpoint{later}" if removed else None


def _trainers(policy: str, prepared: PreparedPolicy, device: str, logs: Path) -> TrainerGroup:
    name = "trainer" if policy == ACTOR else f"trainer-{policy}"
    return TrainerGroup(prepared.config, prepared.sizes, device, logs, prepared.spec.table, prepared.plans, name=name)


def _replanned(prepared: PreparedPolicy, device: str, sizes: Sizes) -> dict[str, Plan]:
    """The plans by which weights leave trainers of `sizes`, which take the place of those that were prepared."""
    plans, encoding = make_plans(prepared.config, prepared.spec, sizes, device)
    assert encoding == prepared.encoding, "which engines got to know at their start"
    return plans


def _columns(config: Config) -> tuple[TableColumn, ...]:
    if (learner := learner_of(config.algorithm)) is not None:
        return learner.columns
    return PPO_COLUMNS if config.critic else RL_COLUMNS if config.rollout.sampled else SFT_COLUMNS


async def start_parts(
    config: Config,
    trainers: Mapping[str, TrainerGroup],
    critic: CriticGroup | None,
    service: EngineService,
    timed: Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]],
) -> None:
    """Start the trainers of each policy, critic and engines, together where that can be. `timed` records how long each
    takes, by name."""
    starting = [partial(timed, prefix_of(name) + "trainers", group.start) for name, group in trainers.items()]
    if critic is not None:
        starting.append(partial(timed, "critic", critic.start))
    if service.frozen.groups:
        starting.append(partial(timed, "frozen engines", service.frozen.start))
    shared = []
    if config.schedule.colocate:
        # Engines are placed where the trainers are, which is known when these have started; and SGLang sizes its KV
        # cache by the memory that is free when it starts, so that trainers must have left.
        starting, first = [], starting
        await together(first)
        shared = await trainers[ACTOR].places() if service.device == "cuda" else []
        await trainers[ACTOR].offload()
    for name, engines in service.place(shared).items():
        starting.append(partial(check_reach, trainers[name], engines))
        starting.append(partial(timed, prefix_of(name) + "engines", engines.start))
    starting += [partial(check_reach, trainers[name], service.engines_of(name)) for name in config.served_beside]
    await together(starting)


def finish(config: Config, directory: Path) -> Path | None:
    """Write the summary and, if configured, the report of a finished run, unless they have been written since its last
    step. Returns the report's path."""
    report = directory / "report.html" if config.track.report else None
    if up_to_date(directory, "summary.json", *([] if report is None else [report.name])):
        return report
    (directory / "summary.json").write_text(json.dumps(summary(directory), indent=1))
    if report is not None:
        entry_points.load("slimx.reports", "html")([directory], report, config.run.name)
    return report


def _open_records(config: Config, table: LiveTable, events: Events, resume_step: int, tokenizer: Any) -> Records:
    records = Records(config, table, tokenizer, events, resume_step=resume_step)
    if config.rollout.policy_engines:  # after what may be refused: it removes files of later steps
        kept = config.track.rollouts
        where, origin = Path(config.run.dir) / DIRECTORY, origin_of(config, tokenizer)
        records.rollouts = StepFiles(where, origin, every=kept.every, keep=kept.keep, resume_step=resume_step)
    return records
