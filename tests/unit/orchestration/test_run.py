"""The loop in one process: what a run does in which order, what it writes down, and where it goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainBatch
from slimx.data.records import Prompt, Trajectory
from slimx.engines.fleet.turn import EnginesTurn
from slimx.engines.outage import Outage
from slimx.errors import DeadlineError, Preempted
from slimx.layout.ranks import Sizes
from slimx.observability.alerts.alerts import Alerts
from slimx.observability.live.table import LiveTable
from slimx.orchestration import publications
from slimx.orchestration.loop import train
from slimx.orchestration.prepare import Sources
from slimx.orchestration.run import Run
from slimx.orchestration.service import EngineService
from slimx.orchestration.state.recording import Records
from slimx.orchestration.state.resume import check_resume
from slimx.orchestration.state.saves import Saves, read_state
from slimx.reshard.parties import NoReceiverLeft
from slimx.rollout import single_turn
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import Generate, RolloutContext
from slimx.trainer.checkpoint import files
from slimx.trainer.checkpoint.files import Report
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, one, prompts, the_tokenizer

SIZES = Sizes()
WAKE = "engines wake"
LIMIT_S = 300.0
"""For what would never end."""


def silent(config: Config) -> Alerts:
    """Alerts that nobody gets."""
    return Alerts(config.run.name, Path(config.run.dir), print, factor=10, at_least=1800)


@dataclass
class Parts:
    """Trainers, engines and the publisher between them: each notes when its turn is."""

    done: list[str] = field(default_factory=list)
    client: FakeEngine = field(default_factory=FakeEngine)
    actors: tuple[None, ...] = (None,)
    name: str = "trainer-judge"
    rows: list[list[list[int]]] = field(default_factory=list)
    """By step the tokens of the rows that were trained."""
    lost: int = 0
    """Publications in which every engine is lost."""
    vacate: Callable[[], Awaitable[None]] | None = None
    """Frees the devices before engines take the rest of their memory."""

    async def train_step(self, updates: list[TrainBatch], *, step: int, version: int) -> dict[str, float]:
        batches = [batch for update in updates for shard in update.shards for batch in shard]
        self.rows.append([part.tolist() for batch in batches for part in np.split(batch.tokens, _ends(batch))])
        self.done.append(f"train {step} at version {version}")
        return {"gap/tokens": 1.0, "gap/max": 0.0}

    async def save(self, path: Path, *, step: int) -> None:
        self.done.append(f"save {step}")
        files.write_report(path, 0, Report({}, []))

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool) -> None:
        self.done.append(f"restore {path.name}")

    async def check_files(self, path: Path, shares: list[bytes]) -> None:
        for share in shares:
            files.check_digests(path, files.decode_records(share))

    async def memory(self) -> dict[str, float]:
        return {}

    def mark(self, text: str) -> None:
        """No log is kept."""

    def late(self) -> None:
        """Nobody is asked for anything."""

    async def reload(self) -> None:
        self.done.append("reload trainers")

    async def offload(self, *, weights: bool = True) -> None:
        self.done.append("offload trainers" if weights else "offload optimizer")

    async def sleep(self) -> None:
        self.done.append("engines sleep")

    async def wake(self) -> None:
        self.done.append("engines wake")

    async def interrupt(self) -> None:
        """Nothing is in flight between two steps."""

    async def publish(self, version: int, *, trainer_step: int) -> SimpleNamespace:
        if self.lost:
            self.lost -= 1
            raise NoReceiverLeft("every engine was lost")
        self.done.append(f"publish {version}")
        self.client.version = version
        manifest = SimpleNamespace(version=version)
        if self.vacate is not None:
            await self.vacate()
        seconds = {"commit": 0.5}
        counts = {"tensors": 3, "nbytes": 2**20, "wire": None}
        return SimpleNamespace(manifest=manifest, seconds=seconds, engines={"e": 1}, lost=(), **counts)


class Silent(Parts):
    """Trainers that never report what they have saved."""

    async def save(self, path: Path, *, step: int) -> None:
        self.done.append(f"save {step}")


def _ends(batch: MicroBatch) -> list[int]:
    return np.cumsum(batch.lengths)[: len(batch.rows)].tolist()[:-1]


class Members:
    """Engines that all serve."""

    def __init__(self) -> None:
        self.outage, self.keeper, self.turn = Outage(), SimpleNamespace(in_flight=None), EnginesTurn()
        self.run = True

    async def available(self) -> None:
        """At once."""

    async def starved(self) -> None:
        await asyncio.Event().wait()

    failed = starved

    def metrics(self) -> dict[str, float]:
        return {"engines/serving": 1.0}

    def awaited(self) -> None:
        """Nothing."""


class Service(EngineService):
    """Started engines without servers: clients that answer by themselves, of every policy."""

    def __init__(self, config: Config, parts: dict[str, Parts], generate: Generate):
        self.sources = Sources(
            spec=None,
            hooks=Hooks(generate, one, None),
            tokenizer=the_tokenizer(),
            by_source={"": prompts()},
            eval_prompts={},
        )
        self.config, self.proxy, self.logs = config, None, Path(config.run.dir)
        self.further = {name: SimpleNamespace(tokenizer=the_tokenizer()) for name in parts if name != "actor"}
        self.clients = {name: each.client for name, each in parts.items()}
        for client in self.clients.values():
            client.retried = 0
        self.frozen = SimpleNamespace(clients={}, metrics=dict)
        self.groups = {
            name: SimpleNamespace(
                members=Members(), engines=[], interrupt=each.interrupt, sleep=each.sleep, wake=each.wake
            )
            for name, each in parts.items()
        }


def run_of(
    directory: Path,
    parts: Parts,
    leaving: asyncio.Event | None = None,
    *,
    further: dict[str, Parts] | None = None,
    generate: Generate = single_turn.generate,
    **keys: Any,
) -> Run:
    """`further`: parts of policies beside the run's own."""
    keys = {
        "trainer__balance": "tokens",
        "track__tensorboard": False,
        "checkpoint__export_hf": False,
        "publish__transport": "memory",
    } | keys
    config = config_of(algorithm__reference=False, **keys)
    run = config.run.model_copy(update={"dir": str(directory)})
    model = directory / "model"
    if not model.exists():
        the_tokenizer().save_pretrained(model)
        (model / "config.json").write_text(json.dumps({"vocab_size": 100}))
    config = config.model_copy(update={"run": run, "model": config.model.model_copy(update={"path": str(model)})})
    each = {"actor": parts, **(further or {})}
    service = Service(config, each, generate)
    policies = {
        name: SimpleNamespace(config=own, spec=None, sizes=SIZES, encoding="hf")
        for name, own in config.by_policy.items()
    }
    prepared = SimpleNamespace(by_source=service.sources.by_source, eval_prompts={}, critic=None, policies=policies)
    records = Records(config, LiveTable(config.schedule.steps, 0, Console(quiet=True)), the_tokenizer(), silent(config))
    saves = Saves(directory / "checkpoints", keep=2)
    return Run(service, prepared, each, records, saves, leaving=leaving)


async def stopped(run: Run) -> None:
    await run.checkpoints.stop()
    await run.rollouts.stop()
    run.records.close()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    parts = Parts()

    def publisher(source: Parts, *_: Any, vacate: Callable[[], Awaitable[None]] | None, **__: Any) -> Parts:
        source.vacate = vacate
        return source

    monkeypatch.setattr(publications, "Publisher", publisher)
    return parts


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open()]


async def test_every_step_trains_publishes_records_and_saves_and_a_second_run_goes_on(tmp_path, parts):
    parts.lost = 2  # both are tried again
    run = run_of(tmp_path, parts, schedule__steps=2, checkpoint__every=2)
    await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    trained = ["publish 0", "train 0 at version 0", "publish 1", "train 1 at version 1", "publish 2"]
    assert parts.done == [*trained, "save 2"]
    steps = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in steps] == [(1, 1), (2, 2)]
    assert steps[0]["metrics"]["publish/commit_seconds"] == 0.5 and steps[0]["metrics"]["publish/mib"] == 1
    assert steps[0]["metrics"]["engines/serving"] == 1 and steps[0]["metrics"]["time/train"] >= 0
    assert {line["step"] for line in lines(tmp_path / "samples.jsonl")} == {1, 2}
    assert run.activity()["step"] == 2 and run.activity()["phase"] == "save_wait"
    newest = Saves(tmp_path / "checkpoints", keep=2).newest()
    state = read_state(newest)
    assert (state.step, state.version, newest.name) == (2, 2, "iter_0000002")

    parts.done.clear()
    again = run_of(tmp_path, parts, schedule__steps=3)
    await again.restore(newest, state)
    assert (again.step, again.version) == (2, 2)
    await asyncio.wait_for(train(again), LIMIT_S)
    await stopped(again)
    assert parts.done == ["restore iter_0000002", "publish 2", "train 2 at version 2", "publish 3", "save 3"]


async def test_a_fork_may_begin_its_prompts_anew_and_its_own_checkpoints_do_not(tmp_path, parts):
    first = run_of(tmp_path / "first", parts, schedule__steps=1)
    await asyncio.wait_for(train(first), LIMIT_S)
    await stopped(first)
    newest = Saves(tmp_path / "first" / "checkpoints", keep=2).newest()
    state = read_state(newest)
    served = state.rollouts["next"]
    assert served > 0 and state.rollouts["source"]["position"] > 0
    for anew, directory, position in ((True, "stage", 0), (False, "stage", served), (True, "first", served)):
        keys = {"run__dir": "d", "run__fork_prompts": "anew" if anew else "continue"}
        run = run_of(tmp_path / directory, parts, **keys)
        await run.restore(newest, state)
        source = run.rollouts.state()["source"]
        assert source["epoch"] * source["count"] + source["position"] == position, (anew, directory)
        assert (run.step, run.rollouts.state()["next"]) == (1, served)
        await stopped(run)


async def test_colocated_engines_sleep_while_trainers_train_and_while_they_save(tmp_path, parts):
    run = run_of(tmp_path, parts, schedule__steps=1, schedule__colocate=True)
    await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    begin, publish = ["engines sleep", "reload trainers"], ["engines wake", "publish 1", "offload trainers"]
    step = [*begin, "train 0 at version 0", "offload optimizer", "engines wake", *publish]
    save = [*begin, "save 1", "offload optimizer", *publish]
    assert parts.done == ["engines wake", "publish 0", "offload trainers", *step, *save]


async def test_a_checkpoint_reaches_colocated_trainers_while_engines_sleep(tmp_path, parts):
    run = run_of(tmp_path, parts, schedule__steps=1, schedule__colocate=True)
    state = run.checkpoints.state(1, 1, run.rollouts.state())
    saves = Saves(tmp_path / "checkpoints", keep=2)
    path = saves.commit(saves.begin(1), state.files(), {})
    async with run.trainers_turn(publish=False):
        await run.restore(path, state)
    await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    assert parts.done[:5] == ["engines sleep", "reload trainers", f"restore {path.name}", "offload optimizer", WAKE]
    assert parts.done[5] == "publish 1"


async def test_a_publication_without_an_engine_waits_for_one_on_devices_that_trainers_have_left(tmp_path, parts):
    run = run_of(tmp_path, parts, schedule__colocate=True)
    members, wake = run.engines.members, run.engines.wake
    members.run = False

    async def available() -> None:
        if not members.run:
            assert members.turn.theirs and parts.done[-1] == "offload trainers"
            members.run = True
            parts.done.append("engines start")

    async def woken() -> None:
        await members.turn.end()
        await wake()

    run.engines.wake, members.available = woken, available
    await asyncio.wait_for(run.publish(), LIMIT_S)
    await stopped(run)
    assert parts.done == [WAKE, "offload trainers", "engines start", WAKE, "publish 0", "offload trainers"]
    assert members.turn.theirs


async def test_a_run_that_is_asked_to_leave_saves_the_step_that_it_is_at(tmp_path, parts):
    leaving = asyncio.Event()
    leaving.set()
    run = run_of(tmp_path, parts, leaving, schedule__steps=5)
    with pytest.raises(Preempted) as asked:
        await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    assert asked.value.step == 0 and parts.done == ["publish 0", "save 0"]
    assert Saves(tmp_path / "checkpoints", keep=2).newest().name == "iter_0000000"


async def test_a_save_is_due_by_steps_or_by_time(tmp_path, parts, monkeypatch):
    run = run_of(tmp_path, parts, checkpoint__every=3, checkpoint__every_seconds=60.0)
    assert [step for step in range(7) if run.checkpoints.due(step)] == [3, 6]
    run.checkpoints._saved_at -= 61
    assert run.checkpoints.due(1)
    await stopped(run)


async def test_the_start_of_a_part_is_a_phase_of_its_own_track(tmp_path):
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "track": {"report": False}}
    )
    records = Records(config, LiveTable(1, 0, Console(quiet=True)), None, silent(config))
    await records.starting("engines", asyncio.sleep(0.05))
    records.close()
    (phase,) = map(json.loads, (tmp_path / "timeline.jsonl").read_text().splitlines())
    assert (phase["name"], phase["track"], phase["step"]) == ("start", "engines", None) and phase["seconds"] >= 0.05


async def spoken_to_both(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """A trajectory of each policy."""
    drafts = [view.draft(prompt, suffix=f"-{name}") for name, view in ctx.policies.items()]
    for draft in drafts:
        draft.add_sampled(await ctx.policies[draft.policy].engine.generate(draft.token_ids))
    return [draft.finish() for draft in drafts]


async def test_two_policies_train_publish_and_save_in_the_same_steps_and_go_on_together(tmp_path, parts):
    judge = Parts()
    both = {"further": {"judge": judge}, "generate": spoken_to_both, "policies__judge": {}}
    run = run_of(tmp_path, parts, schedule__steps=2, checkpoint__every=2, **both)
    await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    trained = ["publish 0", "train 0 at version 0", "publish 1", "train 1 at version 1", "publish 2", "save 2"]
    assert parts.done == judge.done == trained
    # Batches of a step: as many rows for each, those of its own trajectories.
    assert [len(rows) for rows in parts.rows] == [len(rows) for rows in judge.rows] == [8, 8]
    assert all(actor != other for actor, other in zip(parts.rows, judge.rows, strict=True))
    metrics = lines(tmp_path / "metrics.jsonl")[0]["metrics"]
    for name in ("gap/tokens", "reward/mean", "publish/mib", "engines/serving", "batch/microbatches"):
        assert metrics[name] == metrics[f"policy/judge/{name}"], name
    assert "policy/judge/dropped/total" not in metrics and metrics["dropped/total"] == 0
    newest = Saves(tmp_path / "checkpoints", keep=2).newest()
    state = read_state(newest)
    assert [*state.policies] == ["judge"] and (newest / "policies" / "judge").is_dir()
    assert not list(newest.rglob("reports"))

    parts.done.clear()
    judge.done.clear()
    again = run_of(tmp_path, parts, schedule__steps=3, **both)
    check_resume(again.config, SIZES, newest, state, further={"judge": again.policies["judge"]})
    with refused("resume.policies", about="policies"):
        check_resume(again.config, SIZES, newest, state)
    await again.restore(newest, state)
    assert again.maker.versions == {"actor": 2, "judge": 2}
    await asyncio.wait_for(train(again), LIMIT_S)
    await stopped(again)
    assert parts.done == ["restore iter_0000002", "publish 2", "train 2 at version 2", "publish 3", "save 3"]
    assert judge.done == ["restore judge", *parts.done[1:]]


async def test_a_checkpoint_is_complete_when_every_policy_has_written_its_part(tmp_path, parts):
    judge = Silent()
    both = {"further": {"judge": judge}, "generate": spoken_to_both, "policies__judge": {}}
    run = run_of(tmp_path, parts, checkpoint__deadline=0.5, **both)
    await run.save()
    with refused("deadline", about=None, kind=DeadlineError) as error:
        await run.finish_save()
    assert error.value.holder == "trainer-judge rank 0"
    assert Saves(tmp_path / "checkpoints", keep=2).newest() is None
    await stopped(run)


async def test_a_step_without_a_trajectory_of_a_policy_ends_the_run(tmp_path, parts):
    judge = Parts()
    run = run_of(tmp_path, parts, further={"judge": judge}, policies__judge={})
    with refused("policies.idle", about="judge"):
        await asyncio.wait_for(train(run), LIMIT_S)
    assert judge.done == ["publish 0"]
    await stopped(run)
