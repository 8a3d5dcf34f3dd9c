"""`slimx status` tells how far a run is, whether it runs, and what its engines do, from its directory alone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimx import cli
from slimx.config.load import load_config
from slimx.data.records import Prompt, Trajectory
from slimx.extras.watch.status import run_status
from slimx.observability.live import activity
from slimx.observability.live.run_lock import locked
from slimx.orchestration.session import finish
from slimx.rollout import single_turn
from slimx.rollout.hooks import RolloutContext
from tests.refusals import numbers, refused
from tests.unit.rollout.rollout_stand import Stand, config_of

ENGINE = {"name": "actor-0", "role": "regular", "frozen": False, "nodes": 2, "url": "http://h:1", "restarts": 1}

CONFIG = sorted((Path(__file__).parents[3] / "configs" / "moe").glob("*.yaml"))[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": {"name": "r"}, "schedule": {"steps": 9}}))
    rows = [{"step": step, "metrics": {"reward/mean": step / 10, "gap/mean": None}} for step in range(4)]
    # The last line is being written.
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "met')
    (tmp_path / "timeline.jsonl").write_text(json.dumps({"name": "train", "track": "main", "seconds": 3.0}) + "\n")
    (tmp_path / "engines.json").write_text(json.dumps({"engines": [ENGINE | {"standing": "member"}]}))
    (tmp_path / "lock").touch()
    return tmp_path


def status(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    monkeypatch.setattr(sys, "argv", ["slimx", "status", str(directory), *options])
    try:
        cli.main()
    except SystemExit as error:
        assert error.code in (0, 2)
    out = capsys.readouterr()
    return out.out + out.err


def status_lines(text: str, *names: str) -> list[str]:
    """Returns the lines of the status that begin with these names."""
    lines = {line.split()[0]: line for line in text.splitlines()}
    return [lines[name] for name in names]


def test_a_late_result_of_an_earlier_step_is_not_the_newest_step(run):
    rows = [{"step": 3, "metrics": {"reward/mean": 0.5}}, {"step": 1, "metrics": {"eval/accuracy": 0.25}}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_status(run)
    assert found["step"] == 3 and found["metrics"] == {"reward/mean": 0.5}


def test_each_further_policy_has_a_line_of_figures(run, monkeypatch, capsys):
    metrics = {
        "reward/mean": 0.5,
        "policy/entropy": 1.0,
        "policy/judge/reward/mean": 0.25,
        "policy/judge/gap/mean": 0.0,
    }
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "metrics": metrics}) + "\n")
    lines = status(run, monkeypatch, capsys).splitlines()
    (line,) = [line for line in lines if line.startswith("policy")]
    assert line.split()[1] == "judge:" and numbers(line) == [0.25, 0.0]
    assert numbers(next(line for line in lines if line.startswith("step"))) == [0.5]


def test_steps_without_a_signal_are_reported_above_a_threshold(run, monkeypatch, capsys):
    for steps, shown in ((4, 0), (5, 1)):
        records = []
        for step in range(1, steps + 1):
            metrics = {"reward/mean": 1.0, "reward/groups_without_signal": 1.0, "optim/steps_without_signal": step}
            records.append(json.dumps({"step": step, "version": None, "time": 1e9, "metrics": metrics}) + "\n")
        (run / "metrics.jsonl").write_text("".join(records))
        lines = [line for line in status(run, monkeypatch, capsys).splitlines() if line.startswith("alert ")]
        assert len(lines) == shown and all(numbers(line)[0] == steps for line in lines)


def test_the_newest_checkpoint_is_printed_for_a_directory_and_a_file(run, tmp_path, monkeypatch, capsys):
    assert status(run, monkeypatch, capsys, "--saved") == "0\n"
    for name in ("iter_0000004", "iter_0000040", "iter_0000050.partial", "iter_0000060.damaged"):
        (run / "checkpoints" / name / "slimx").mkdir(parents=True)
        (run / "checkpoints" / name / "slimx" / "manifest.json").touch()
    assert status(run, monkeypatch, capsys, "--saved") == "40\n"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "m"}, "rollout": {"prompts": "p"}}))
    assert status(file, monkeypatch, capsys, f"run.dir={run}", "--saved") == "40\n"


def test_the_status_of_a_running_run_lists_its_engines(run, monkeypatch, capsys):
    with locked(run):
        text = status(run, monkeypatch, capsys)
    head, *lines = text.splitlines()
    assert head.split()[:3] == ["run", "r:", "running,"] and numbers(head)[:2] == [3, 9] and head.split()[-1] == "train"
    assert "reward/mean 0.3\n" in text
    (engine,) = (line for line in lines if "actor-0" in line)
    assert all(part in engine for part in ("regular", "member (serving)", "http://h:1"))
    assert numbers(engine)[-2:] == [2, 1], "machines and restarts"


def test_restarts_and_waits_are_shown_with_their_reasons(run, monkeypatch, capsys):
    restart = {"part": "engine actor-0", "at": time.time(), "seconds": 14.2}
    failed = restart | {"reason": "it hangs", "error": "no memory"}
    again = restart | {"reason": "no memory", "error": ""}
    router = {"name": "router", "url": "http://h:2", "up": False, "restarts": 1, "history": [again]}
    engine = ENGINE | {"standing": "out", "restarts": 2, "history": [failed, again]}
    (run / "engines.json").write_text(json.dumps({"engines": [engine], "routers": [router]}))
    since = time.time() - 65
    awaited = {"what": "an engine (actor-0), which is started again", "since": since}
    doing = {"written": time.time(), "step": 4, "phase": "generate", "since": time.time(), "rollouts": None}
    (run / "activity.json").write_text(json.dumps(doing | {"awaited": awaited}))
    with locked(run):
        lines = status(run, monkeypatch, capsys).splitlines()
    (waiting,) = (line for line in lines if awaited["what"] in line)
    (minutes,) = numbers(waiting.partition(awaited["what"])[2])
    assert 65 <= 60 * minutes + 0.3 <= time.time() - since + 1
    (at,) = [number for number, line in enumerate(lines) if line.startswith("engine   actor-0")]
    assert "it hangs" in lines[at + 1] and "no memory" in lines[at + 1] and "no memory" in lines[at + 2]
    assert lines[at + 3].split()[:3] == ["router", "router:", "down"] and "http://h:2" in lines[at + 3]
    assert "14.2 s" in lines[at + 4]
    assert run_status(run)["routers"] == [router]


def test_a_run_that_ended_has_no_engines(run, monkeypatch, capsys):
    text = status(run, monkeypatch, capsys)
    head = text.splitlines()[0]
    assert "not running" in head and numbers(head)[:2] == [3, 9] and "actor" not in text


def test_a_run_that_has_written_nothing_yet_is_at_step_0(run):
    for name in ("metrics.jsonl", "timeline.jsonl", "engines.json", "lock"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text("\n")
    found = run_status(run)
    assert (found["step"], found["running"], found["engines"], found["seconds_ago"]) == (0, False, [], None)


def test_a_directory_without_a_run_is_refused(tmp_path, monkeypatch, capsys):
    message = status(tmp_path, monkeypatch, capsys)
    assert message.startswith("slimx: ") and str(tmp_path) in message


def activity_of(stand: Stand, phase: str, since: float) -> dict[str, Any]:
    return {"written": time.time(), "step": 4, "phase": phase, "since": since, "rollouts": stand.manager.status()}


async def test_a_run_says_what_each_part_does_and_waits_for_and_since_when(run, monkeypatch, capsys):
    config = config_of(schedule__max_staleness=2)
    released = asyncio.Event()

    async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        if (ctx.group_id, ctx.index) == ("g1", 1):
            await released.wait()
        return await single_turn.generate(ctx, prompt)

    async with Stand(config, generate=generate) as stand:
        waiting = asyncio.create_task(stand.next_batch())
        while stand.manager.in_flight != 1:
            await asyncio.sleep(0.001)
        ticket = stand.manager.tickets[1]
        ticket.since -= 65
        with locked(run):
            (run / "activity.json").write_text(json.dumps(activity_of(stand, "generate", time.time() - 61)))
            text = status(run, monkeypatch, capsys)
            now, trainers, engines, rollouts, oldest = status_lines(
                text, "now", "trainers", "engines", "rollouts", "oldest"
            )
            assert "generate" in now and numbers(now)[:2] == [4, pytest.approx(1.02, abs=0.05)], "step, minutes in it"
            assert trainers.endswith("wait for rollouts") and "generate" in engines and numbers(engines) == [0]
            assert numbers(rollouts) == [12, 1, 11], "groups: all, generated and done"
            about = oldest.partition(ticket.prompt.id)
            assert "g1" in about[0] and 1 <= numbers(about[2])[0] < 2 and numbers(about[2])[1:] == [0, 1, 2, 3]
            released.set()
            await waiting
            (run / "activity.json").write_text(json.dumps(activity_of(stand, "train", time.time()) | {"written": 0}))
            text = status(run, monkeypatch, capsys)
            trainers, engines, rollouts = status_lines(text, "trainers", "engines", "rollouts")
            assert trainers.split()[1:] == ["train"] and "last update" in text
            assert "staleness" in engines and numbers(rollouts) == [8, 0, 8, 4], "the last wait for a version"


def test_no_time_is_negative_if_the_clock_of_the_run_is_ahead(run, monkeypatch, capsys):
    ahead = time.time() + 900
    doing = {"written": ahead, "step": 4, "phase": "train", "since": ahead - 60, "rollouts": None}
    (run / activity.FILE).write_text(json.dumps(doing))
    os.utime(run / "metrics.jsonl", (ahead, ahead))
    with locked(run):
        (now,) = status_lines(status(run, monkeypatch, capsys), "now")
    assert numbers(now)[:2] == [4, 1], "the step, and the minutes since the phase began"
    assert run_status(run)["seconds_ago"] == 0


async def test_the_activity_is_written_anew_while_a_run_goes_on(run, monkeypatch):
    monkeypatch.setattr(activity, "EVERY_S", 0.01)
    looks, notes = iter(range(1000)), []
    async with activity.writing_activity(
        run, lambda: {"step": next(looks), "phase": "train", "since": time.time()}, notes.append
    ):
        while (run_status(run)["activity"] or {"step": 0})["step"] < 2:
            await asyncio.sleep(0.01)
    assert not notes
    watched: list[dict[str, object]] = []
    later = run / "later"
    async with activity.writing_activity(later, lambda: {"step": 1}, notes.append, watch=watched.append):
        while len(watched) < 3:
            await asyncio.sleep(0.01)
        later.mkdir()
        while activity.read_activity(later) is None:
            await asyncio.sleep(0.01)
    assert [activity.FILE in note for note in notes] == [True], "a run does not end because of its status"


def test_a_run_that_was_summed_up_is_finished_until_it_goes_on(run):
    assert not run_status(run)["finished"]
    (run / "summary.json").write_text("{}")
    assert run_status(run)["finished"]
    with locked(run):
        assert not run_status(run)["finished"]
    later = (run / "summary.json").stat().st_mtime_ns + 1
    os.utime(run / "metrics.jsonl", ns=(later, later))
    assert not run_status(run)["finished"]


def test_a_finished_run_is_summed_up_once(run, tmp_path):
    config = load_config(CONFIG, [f"run.dir={run}", "track.report=false"])
    rows = [{"step": step, "metrics": {"reward/mean": step / 10, "time/step": 1.0}} for step in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish(config, run)
    (run / "summary.json").write_text("kept")
    finish(config, run)
    assert (run / "summary.json").read_text() == "kept"
    later = (run / "summary.json").stat().st_mtime_ns + 1
    os.utime(run / "metrics.jsonl", ns=(later, later))
    finish(config, run)
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_a_directory_in_which_nothing_can_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for directory in (Path("/proc/x"), tmp_path / "file", tmp_path / "file" / "run"):
        with refused("run.unwritable", about=str(directory)), locked(directory):
            pytest.fail("held")


@pytest.mark.parametrize(
    ("since", "written", "times", "state"),
    [
        (60, 1, [2.0, 2.0], "running"),
        (1900, 1, [2.0, 2.0], "stalled"),  # longer than at_least, and than ten times the usual
        (1900, 1, [200.0, 300.0, 210.0], "running"),
        (2200, 1, [200.0, 300.0, 210.0], "stalled"),
        (1900, 1, [], "stalled"),
        (5, 130, [2.0], "stalled"),  # the driver itself says nothing
    ],
)
def test_a_phase_is_stalled_by_its_usual_time_and_a_driver_by_its_silence(
    run, monkeypatch, capsys, since, written, times, state
):
    now = time.time()
    values = {"written": now - written, "step": 4, "phase": "train", "since": now - since, "rollouts": None}
    (run / activity.FILE).write_text(json.dumps(values))
    other = {"name": "publish", "track": "main", "seconds": 9.0}
    phases = [other, *({"name": "train", "track": "main", "seconds": seconds} for seconds in times), other]
    (run / "timeline.jsonl").write_text("".join(json.dumps(phase) + "\n" for phase in phases))
    with locked(run):
        assert run_status(run)["state"] == state
        assert checked(run, monkeypatch) == {"running": 0, "stalled": 4}[state]
    assert run_status(run)["usual_seconds"] == (sorted(times)[len(times) // 2] if times else None)
    assert checked(run, monkeypatch) == 5, "no process holds its lock"
    (run / "summary.json").write_text("{}")
    assert checked(run, monkeypatch) == 3
    assert checked(run / "nowhere", monkeypatch) == 2


def checked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the exit status of `slimx status --check`."""
    monkeypatch.setattr(sys, "argv", ["slimx", "status", str(directory), "--check"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def test_late_ranks_are_named_with_their_logs(run, monkeypatch, capsys):
    now = time.time()
    late = {"what": "the training step", "ranks": ["trainers rank 3"], "logs": ["RUN/logs/trainers-3.log"], "of": 4}
    values = {"written": now, "step": 4, "phase": "train", "since": now - 30, "rollouts": None, "late": late}
    (run / activity.FILE).write_text(json.dumps(values))
    with locked(run):
        text = status(run, monkeypatch, capsys)
        assert "trainers rank 3" in text and "RUN/logs/trainers-3.log" in text
        late["ranks"] = [f"trainers rank {rank}" for rank in range(4)]
        (run / activity.FILE).write_text(json.dumps(values))
        assert "trainers rank" not in status(run, monkeypatch, capsys), "all work: none is late"
