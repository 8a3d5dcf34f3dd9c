"""A run from start to end: checks and starts everything, runs the training loop, and stops everything, whatever the
outcome."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from slimx import entry_points
from slimx.algorithms.learner import learner_of
from slimx.cluster.connection import device_of
from slimx.cluster.starting import Starting
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR, prefix_of
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of
from slimx.engines.fleet.handle import kernels_of
from slimx.errors import Interrupted, counted
from slimx.layout.ranks import Sizes
from slimx.models.families import read_trunk
from slimx.observability.events import Events, open_events
from slimx.observability.live.activity import FILE, writing_activity
from slimx.observability.live.safe_text import plain
from slimx.observability.live.table import PPO_COLUMNS, RL_COLUMNS, SFT_COLUMNS, LiveTable, TableColumn, with_policies
from slimx.observability.tracking.run_files import up_to_date
from slimx.orchestration.batches import longest_trajectory, make_packer
from slimx.orchestration.engines.service import EngineService, check_reach
from slimx.orchestration.lifetime.garbage import frozen_heap
from slimx.orchestration.lifetime.hangs import keep_stacks
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_training(config: Config, console: Console) -> Path:
    """Trains as `config` describes, and returns the run's directory. Raises SlimxError if the run fails. After a
    signal, raises Preempted if the run has saved a checkpoint (SIGUSR1), and Interrupted otherwise."""
    return run_session(config, console, train)


def run_session(config: Config, console: Console, work: Callable[[Run], Awaitable[None]]) -> Path:
    """Checks `config`, starts all parts of the run, awaits `work(run)`, and stops everything. Returns the run's
    directory.

    Raises SlimxError if the run fails. After a signal, raises Preempted if the run has saved a checkpoint (SIGUSR1),
    and Interrupted otherwise."""
    directory = Path(config.run.dir)
    options = config.checkpoint
    saves = Saves(directory / "checkpoints", keep=options.keep, keep_every=options.keep_every)
    check_start(config, directory, saves)  # before the slow reading of models; `resume_point` checks again
    prepared = check_run(config)
    with begun(directory):
        (directory / FILE).unlink(missing_ok=True)  # an earlier process's file, which `slimx status` would show
        with open_events(config, partial(_say, console)) as events:
            while True:
                try:
                    _attempt(config, prepared, saves, events, console, work)
                    return directory
                except Damaged as error:
                    _say(console, _skip_damaged(error, saves, options.damaged))
                except Interrupted as error:
                    error.args = (f"{error}; repeat the command to resume from {saves.newest() or 'the start'}",)
                    raise


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
    """Starts the run from its newest checkpoint, if it has one, and awaits `work(run)`. Raises Damaged if the
    checkpoint is damaged."""
    directory = Path(config.run.dir)
    resume_from = resume_point(config, directory, saves)
    state = None
    if resume_from is not None:
        state = read_state(resume_from)
        if finished(config, directory, state):
            sentence = f"the run in {directory} is finished at step {state.step}; raise schedule.steps to continue it"
            _say(console, sentence + unused(config))
            return
        check_resume(resume_from, state, prepared.policies, prepared.critic)
        check_order(config, prepared.by_source, state.rollouts, forked=resume_from.parent != saves.directory)
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


def _skip_damaged(error: Damaged, saves: Saves, strategy: str) -> str:
    """Renames a damaged checkpoint, so that the run resumes from the previous one, and returns a message about it.
    Raises `error` if `strategy` (`checkpoint.damaged`) is not "skip", if the checkpoint belongs to another run, or if
    there is no previous one."""
    aside = None
    if strategy == "skip" and error.checkpoint.parent == saves.directory:  # not another run's
        aside = saves.set_aside(error.checkpoint)
    if aside is None:
        raise error
    return (
        f"{error.about} {error.problem}; its checkpoint is renamed to {aside.name}, and the run resumes from the "
        "previous one"
    )


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
    directory = Path(config.run.dir)
    actor = prepared.policies[ACTOR]
    state = read_state(resume_from) if resume_from else None
    done = state.step if state else 0
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    async with EndingStack(alarm, partial(keep_stacks, directory, partial(_say, console))) as stack:
        columns = with_policies(_columns(config), [name for name in prepared.policies if name != ACTOR])
        table = stack.enter_context(LiveTable(config.schedule.steps, done, console, columns))
        tokenizers = {name: policy.tokenizer for name, policy in prepared.policies.items()}
        records = _open_records(config, table, events, done + 1 if done else 0, tokenizers)
        stack.callback(records.close)
        table.start(starting.line, starting.since)
        table.milestone("Ray ready")
        if config.publish.transport == "auto" and config.served.policy:
            table.note(f"publish.transport {actor.transport}")
        config = actor.config
        device = device_of(config)
        trainers: dict[str, TrainerGroup] = {}
        for name, policy in prepared.policies.items():
            trainers[name] = _trainers(name, policy, device, logs)
            stack.push_async_exit(stopping(trainers[name].stop, table.note))
        critic = _critic(config, prepared, trainers[ACTOR], device, logs)
        if critic is not None:
            stack.push_async_exit(stopping(critic.stop, table.note))
        service = EngineService(
            config, prepared, directory, note=table.note, record=records.restarted, lost=records.engine_lost
        )
        await stack.enter_async_context(service)
        await start_parts(config, trainers, critic, service, records.starting)
        recovery = make_recovery(trainers[ACTOR], records, logs, partial(_replanned, actor, device))
        stack.push_async_callback(recovery.stop)
        alarm.ring_after(recovery.watch())
        for ranks in _watched(trainers, critic):
            alarm.ring_after(watch_ranks(ranks, ranks.config.trainer.watch_deadline))
        layouts = [actor.sizes]
        if prepared.critic is not None:
            layouts.append(prepared.critic)
        await service.open(longest_trajectory(config, actor.spec, *layouts))
        _note_backends(prepared, service, table.note)
        run = Run(service, prepared, trainers, records, saves, recovery, critic=critic, leaving=alarm.leaving)
        run.checkpoints.on_failure = alarm.ring
        stack.push_async_callback(run.rollouts.stop)
        stack.push_async_callback(run.checkpoints.stop)
        await stack.enter_async_context(writing_activity(directory, run.activity, table.note, watch=events.look))
        for engines in service.groups.values():
            engines.members.watch()
        if state is not None and resume_from is not None:
            async with run.trainers_turn(publish=False):
                await run.restore(resume_from, state)
                await restore_reference(run, resume_from)
        line = resume_line(resume_from, done, records.tracker.removed)
        if line is not None:
            table.note(line)
        same = state is None or state.policies[ACTOR]["layout"] == layout_of(actor.sizes)
        await recovery.open(run.checkpoints, done, resume_from, same_layout=same)
        stack.enter_context(frozen_heap())
        stack.callback(table.milestone, f"stopping {starting.parts}")
        await work(run)
        events.tell("finished", f"the run is finished after {counted(run.step, 'step')}")


def _note_backends(prepared: Prepared, service: EngineService, note: Callable[[str], None]) -> None:
    """Reports the kernels that trainers and engines use and, if recorded rollouts are replayed, the directory from
    which they are read."""
    reasons = chain.from_iterable(policy.backends.reasons for policy in prepared.policies.values())
    for reason in dict.fromkeys(reasons):
        note(reason)
    handles = chain.from_iterable(group.engines for group in service.groups.values())
    if service.device == "cuda":
        for kernels in dict.fromkeys(kernels_of(engine.attestation) for engine in handles):
            note(f"engines: {kernels}")
    config = prepared.policies[ACTOR].config
    if config.rollout.replay:
        message = f"rollouts are replayed from {config.rollout.replay}, so no engine is started"
        if config.eval.files:
            message += " and eval.prompts is not used"
        note(message)


def resume_line(checkpoint: Path | None, step: int, removed: int) -> str | None:
    """Returns a message about a run that resumes from `checkpoint` after `step` completed steps; None for a new run.
    `removed`: number of lines that were removed from the run's metrics.jsonl because they were incomplete or belonged
    to later steps; if it is not 0, a message is returned even without a checkpoint."""
    later = ""
    if removed:
        later = f"; removed from metrics.jsonl: {counted(removed, 'incomplete or later line')}"
    if checkpoint is not None:
        return f"resumed at step {step} from {checkpoint}{later}"
    if removed:
        return f"the run starts from the beginning because it has no checkpoint{later}"
    return None


def _trainers(policy: str, prepared: PreparedPolicy, device: str, logs: Path) -> TrainerGroup:
    name = "trainer" if policy == ACTOR else f"trainer-{policy}"
    return TrainerGroup(prepared.config, prepared.sizes, device, logs, prepared.spec.table, prepared.plans, name=name)


def _critic(config: Config, prepared: Prepared, trainers: TrainerGroup, device: str, logs: Path) -> CriticGroup | None:
    if prepared.critic is None:
        return None
    packer = make_packer(config.as_critic(), read_trunk(config.model), prepared.critic)
    return CriticGroup(config, prepared.critic, packer, trainers=trainers, log_dir=logs, device=device)


def _watched(trainers: Mapping[str, TrainerGroup], critic: CriticGroup | None) -> list[RankGroup]:
    """Returns the rank groups whose loss ends the run: the trainers of all policies except the actor's, and the
    critic's dedicated ranks."""
    groups: list[RankGroup] = [group for name, group in trainers.items() if name != ACTOR]
    if critic is not None and critic.dedicated is not None:
        groups.append(critic.dedicated)
    return groups


def _replanned(prepared: PreparedPolicy, device: str, sizes: Sizes) -> dict[str, Plan]:
    """Returns the export and publication plans that replace those in `prepared` when trainers are restarted with the
    parallel sizes `sizes`."""
    plans, encoding = make_plans(prepared.config, prepared.spec, sizes, device)
    assert encoding == prepared.encoding, "the encoding must not change, because engines received it at their start"
    return plans


def _columns(config: Config) -> Sequence[TableColumn]:
    learner = learner_of(config.algorithm)
    if learner is not None:
        return learner.columns
    if config.critic:
        return PPO_COLUMNS
    if config.rollout.sampled:
        return RL_COLUMNS
    return SFT_COLUMNS


async def start_parts(
    config: Config,
    trainers: Mapping[str, TrainerGroup],
    critic: CriticGroup | None,
    service: EngineService,
    timed: Callable[[str, Callable[[], Awaitable[object]]], Awaitable[None]],
) -> None:
    """Starts the trainers of each policy, the critic and the engines. They start concurrently, except colocated
    engines, which start after the trainers. `timed` awaits the start of a part and records its duration under the
    part's name."""
    starting: list[Callable[[], Awaitable[object]]] = []
    for name, trainer_group in trainers.items():
        starting.append(partial(timed, prefix_of(name) + "trainers", trainer_group.start))
    if critic is not None:
        starting.append(partial(timed, "critic", critic.start))
    if service.frozen.groups:
        starting.append(partial(timed, "frozen engines", service.frozen.start))
    shared = []
    if config.schedule.colocate:
        # Engines are placed on the trainers' GPUs, which are known once the trainers have started. SGLang sizes its KV
        # cache by the free memory at its start, so the trainers must be offloaded first.
        await together(starting)
        starting = []
        if service.device == "cuda":
            shared = await trainers[ACTOR].places()
        await trainers[ACTOR].offload()
    for part, groups in (("engines", service.place(shared)), ("evaluation engines", service.evaluation_engines.groups)):
        for name, engines in groups.items():
            starting.append(partial(check_reach, trainers[name], engines))
            starting.append(partial(timed, prefix_of(name) + part, engines.start))
    for name in config.served_by_actor:
        shared_engines = service.engines_of(name)
        if shared_engines is not None:
            starting.append(partial(check_reach, trainers[name], shared_engines))
    await together(starting)


def finish(config: Config, directory: Path) -> Path | None:
    """Writes summary.json of a finished run, and report.html if `track.report` is set, unless these files are newer
    than the run's last step. Returns the path of the report; None if `track.report` is not set."""
    report = None
    files = ["summary.json"]
    if config.track.report:
        report = directory / "report.html"
        files.append(report.name)
    if up_to_date(directory, *files):
        return report
    (directory / "summary.json").write_text(json.dumps(summary(directory), indent=1))
    if report is not None:
        entry_points.load("slimx.reports", "html")([directory], report, config.run.name)
    return report


def _open_records(
    config: Config,
    table: LiveTable,
    events: Events,
    resume_step: int,
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
) -> Records:
    records = Records(config, table, tokenizers, events, resume_step=resume_step)
    if config.served.policy:  # last, because it removes files of later steps
        options = config.track.rollouts
        directory = Path(config.run.dir) / DIRECTORY
        origin = origin_of(config, tokenizers[ACTOR])
        records.rollouts = StepFiles(directory, origin, every=options.every, keep=options.keep, resume_step=resume_step)
    return records
