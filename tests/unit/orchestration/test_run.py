"""The loop in one process: what a run does in which order, what it writes down, and where it goes on."""

from __future__ import annotations

import asyncio
import io
import json
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from slimx.config.schema import Config
from slimx.errors import Preempted
from slimx.observability.events import Events
from slimx.observability.live.table import LiveTable
from slimx.orchestration.loop import train
from slimx.orchestration.state.recording import Records
from slimx.orchestration.state.saves import Saves, read_state
from tests.refusals import refused
from tests.unit.orchestration.run_stand import LIMIT_S, WAKE, lines, run_of, stopped


async def test_every_step_trains_publishes_and_saves_and_a_second_run_continues(tmp_path, parts):
    parts.lost = 2  # both are tried again
    run = run_of(tmp_path, parts, schedule__steps=2, checkpoint__every=2)
    await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    trained = ["publish 0", "train 0 at version 0", "publish 1", "train 1 at version 1", "publish 2"]
    assert parts.done == [*trained, "save 2"]
    phases = [line for line in lines(tmp_path / "timeline.jsonl") if line["track"] == "main"]
    assert parts.marks == [f"step {phase['step']}: {phase['name']}" for phase in phases]
    assert [phase["name"] for phase in phases[-3:]] == ["save_wait", "save", "save_wait"]
    steps = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in steps] == [(1, 1), (2, 2)]
    assert steps[0]["metrics"]["publish/commit_seconds"] == 0.5 and steps[0]["metrics"]["publish/mib"] == 1
    assert steps[0]["metrics"]["engines/serving"] == 1 and steps[0]["metrics"]["time/train"] >= 0
    samples = lines(tmp_path / "samples.jsonl")
    assert {line["step"] for line in samples} == {1, 2} and samples[0]["reward_parts"] == {}
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


@pytest.mark.parametrize(("sampled", "phase"), [(True, "generate"), (False, "prepare")])
async def test_a_run_that_samples_nothing_has_no_phase_generate(tmp_path, parts, sampled, phase):
    run = run_of(tmp_path, parts, schedule__steps=1)
    run.sampled = sampled
    await asyncio.wait_for(run.next_batch(), LIMIT_S)
    assert run.activity()["phase"] == phase
    await stopped(run)


async def test_a_fork_may_restart_its_prompts_but_its_resumes_do_not(tmp_path, parts):
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


async def test_a_publication_without_engines_waits_for_one(tmp_path, parts):
    run = run_of(tmp_path, parts, schedule__colocate=True)
    engines = run.policies["actor"].engines
    members, wake = engines.members, engines.wake
    members.run = False

    async def available() -> None:
        if not members.run:
            assert members.engine_phase.active and parts.done[-1] == "offload trainers"
            members.run = True
            parts.done.append("engines start")

    async def woken() -> None:
        await members.engine_phase.end()
        await wake()

    engines.wake, members.available = woken, available
    await asyncio.wait_for(run.publish(), LIMIT_S)
    await stopped(run)
    assert parts.done == [WAKE, "offload trainers", "engines start", WAKE, "publish 0", "offload trainers"]
    assert members.engine_phase.active


async def test_a_preempted_run_saves_its_current_step(tmp_path, parts):
    leaving = asyncio.Event()
    leaving.set()
    run = run_of(tmp_path, parts, leaving, schedule__steps=5)
    with pytest.raises(Preempted) as caught:
        await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    assert caught.value.step == 0 and parts.done == ["publish 0", "save 0"]
    assert Saves(tmp_path / "checkpoints", keep=2).newest().name == "iter_0000000"


async def test_a_save_is_due_by_steps_or_by_time(tmp_path, parts, monkeypatch):
    run = run_of(tmp_path, parts, checkpoint__every=3, checkpoint__every_seconds=60.0)
    assert [step for step in range(7) if run.checkpoints.due(step)] == [3, 6]
    run.checkpoints._saved_at -= 61
    assert run.checkpoints.due(1)
    await stopped(run)


async def test_steps_without_a_signal_are_counted_in_the_metrics_of_each_step(tmp_path):
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "track": {"report": False}}
    )
    records = Records(config, LiveTable(3, 0, Console(quiet=True)), {}, Events())
    for step, silent_groups in enumerate((1.0, 1.0, 0.5), 1):
        metrics = {"reward/groups_without_signal": silent_groups, "optim/grad_norm": 0.1}
        records.step(step, None, metrics, [], 1.0)
    records.close()
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["optim/steps_without_signal"] for row in rows] == [1.0, 2.0, 0.0]


async def test_the_start_of_a_part_is_a_phase_on_its_track(tmp_path):
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "track": {"report": False}}
    )
    records = Records(config, LiveTable(1, 0, Console(quiet=True)), {}, Events())
    await records.starting("engines", partial(asyncio.sleep, 0.05))
    records.close()
    (phase,) = map(json.loads, (tmp_path / "timeline.jsonl").read_text().splitlines())
    assert (phase["name"], phase["track"], phase["step"]) == ("start", "engines", None) and phase["seconds"] >= 0.05


@pytest.mark.parametrize(("scores", "word"), [(False, "reward"), (True, "accuracy")])
def test_a_mean_reward_is_called_as_in_the_report(scores, word):
    out = io.StringIO()
    config = SimpleNamespace(algorithm=SimpleNamespace(scores=scores))
    records = SimpleNamespace(
        table=LiveTable(1, 0, Console(file=out)), config=config, _write_samples=lambda *_, **__: None
    )
    Records.evaluation(records, 3, {"eval/accuracy": 0.5}, [])
    assert f"held-out {word} " in out.getvalue()


def spoiling_credit(group):
    group.trajectories[0].metadata["tutor"] = object()
    return [trajectory.reward for trajectory in group.trajectories]


def spoiling_advantages(groups):
    groups[0].trajectories[0].loss_mask[:] = 255
    return [1.0 for group in groups for trajectory in group.trajectories]


@pytest.mark.parametrize(
    ("key", "hook", "code"),
    [("credit", spoiling_credit, "rollout.metadata"), ("advantages", spoiling_advantages, "rollout.loss_mask")],
)
async def test_a_group_spoilt_by_credit_or_advantages_ends_the_run(tmp_path, parts, key, hook, code):
    path = f"{__name__}.{hook.__name__}"
    run = run_of(tmp_path, parts, schedule__steps=1, **{f"algorithm__{key}": path})
    with refused(code) as caught:
        await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    assert path in str(caught.value)
