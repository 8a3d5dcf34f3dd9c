"""From a configuration to a started run: which checkpoint it goes on from, under the lock, and a full disk then."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slimx.config.schema import Config
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Prompt
from slimx.errors import Interrupted, SlimxError
from slimx.layout.ranks import Sizes
from slimx.observability.live.run_lock import is_locked
from slimx.orchestration import session
from slimx.orchestration.state.resume import trainer_state
from slimx.orchestration.state.saves import RunState, Saves
from slimx.trainer.checkpoint.files import Damaged
from tests.full_disk import fill, small_disk
from tests.refusals import numbers, refused
from tests.unit.orchestration.checkpointing_stand import trained

LAYOUT = Sizes()
PROMPTS = [Prompt(id="p", messages=[{"role": "user", "content": "1"}])]


def config_of(directory: Path, **checkpoint: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": "m"},
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
            "checkpoint": checkpoint,
        }
    )


def saved(directory: Path, *steps: int) -> list[Path]:
    saves, out = Saves(directory / "checkpoints", keep=10), []
    for step in steps:
        state = RunState(
            step=step,
            version=step,
            policies={"actor": trainer_state(config_of(directory), LAYOUT)},
            rollouts={"source": PromptSource(PROMPTS, 1).state(), "next": 0, "tickets": []},
        )
        out.append(saves.commit(saves.begin(step), state.files(), {}))
    return out


class Started:
    """A stand-in for Ray and the parts of a run: it notes from where each start went on, and may find damage then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path):
        self.directory, self.at, self.damaged = directory, [], []
        self.resume_point = session.resume_point
        prepared = SimpleNamespace(policies=trained(config_of(directory), LAYOUT), critic=None, by_source={"": PROMPTS})
        monkeypatch.setattr(session, "check_run", lambda config: prepared)
        monkeypatch.setattr(session, "resume_point", self._resume_point)
        monkeypatch.setattr(session, "_session", self._session)
        monkeypatch.setattr(session, "run_with_ray", lambda config, device, work: asyncio.run(work(None)))

    def _resume_point(self, config: Config, directory: Path, saves: Saves) -> Path | None:
        assert is_locked(self.directory), "another run could write one meanwhile"
        return self.resume_point(config, directory, saves)

    async def _session(self, config: Any, prepared: Any, saves: Any, resume_from: Path | None, *_: Any) -> None:
        self.at.append(None if resume_from is None else resume_from.name)
        if resume_from in self.damaged:
            raise Damaged(resume_from, resume_from / "__0_0.distcp", "has other bytes than were written")


def run(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    session.run_session(config, Console(width=1000), None)
    return capsys.readouterr().out


def test_a_damaged_newest_checkpoint_is_set_aside(tmp_path, monkeypatch, capsys):
    started = Started(monkeypatch, tmp_path)
    _, second, third, fourth = saved(tmp_path, 1, 2, 3, 4)
    (fourth / "slimx/tickets.bin").write_bytes(b"torn")  # found before anything starts
    started.damaged = [third]  # found when the ranks read it
    output = run(config_of(tmp_path), capsys)
    assert started.at == [third.name, second.name] and output.count("starting 1 trainer\n") == 2
    assert str(fourth / "slimx/tickets.bin") in output and str(third / "__0_0.distcp") in output
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.damaged")) == [
        "iter_0000003.damaged",
        "iter_0000004.damaged",
    ]


@pytest.mark.parametrize("steps", [(), (1, 2)])
def test_a_stopped_run_names_the_checkpoint_that_it_resumes_from(tmp_path, monkeypatch, capsys, steps):
    Started(monkeypatch, tmp_path)
    checkpoints = saved(tmp_path, *steps)

    def stop(*_: object) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(session, "run_with_ray", stop)
    with pytest.raises(Interrupted) as error:
        run(config_of(tmp_path), capsys)
    assert error.value.signum == signal.SIGTERM and str(error.value).startswith("SIGTERM; ")
    assert [path for path in checkpoints if str(path) in str(error.value)] == checkpoints[-1:]


def test_another_seed_is_refused_before_any_file_changes(tmp_path, monkeypatch, capsys):
    started = Started(monkeypatch, tmp_path)
    saved(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = config_of(tmp_path)
    with refused("prompts.changed", about="seed"):
        run(config.model_copy(update={"run": config.run.model_copy(update={"seed": 2})}), capsys)
    assert not started.at
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(("steps", "policy"), [((4,), "skip"), ((3, 4), "stop")])
def test_the_only_one_and_one_that_must_not_be_passed_over_stop_the_run(tmp_path, monkeypatch, capsys, steps, policy):
    started = Started(monkeypatch, tmp_path)
    newest = saved(tmp_path, *steps)[-1]
    (newest / "slimx/run.json").write_text("{")
    with pytest.raises(Damaged) as error:
        run(config_of(tmp_path, damaged=policy), capsys)
    assert error.value.code == "checkpoint.damaged" and error.value.about == str(newest / "slimx/run.json")
    assert not started.at and newest.is_dir()


def test_another_runs_damaged_checkpoint_is_left_alone(tmp_path, monkeypatch, capsys):
    started = Started(monkeypatch, tmp_path / "own")
    first, second = saved(tmp_path / "other", 1, 2)
    (second / "slimx/tickets.bin").write_bytes(b"")
    config = config_of(tmp_path / "own")
    config = config.model_copy(update={"run": config.run.model_copy(update={"fork": str(second)})})
    with pytest.raises(Damaged) as error:
        run(config, capsys)
    assert error.value.about == str(second / "slimx/tickets.bin") and second.is_dir() and not started.at


def test_a_full_disk_at_resume_is_named_and_leaves_the_configuration_whole(tmp_path, monkeypatch, capsys):
    with small_disk(tmp_path / "disk", kib=256) as disk:
        started = Started(monkeypatch, disk)
        saved(disk, 1)
        run(config_of(disk), capsys)
        before = (disk / "config.yaml").read_text()
        fill(disk)
        with pytest.raises(SlimxError) as error:
            run(config_of(disk, keep=7), capsys)
        assert error.value.code == "disk.write" and error.value.about == str(disk / "config.yaml")
        assert (disk / "config.yaml").read_text() == before
        assert started.at == ["iter_0000001"] and not (disk / "config.yaml.partial").exists()


class StartedParts:
    """Trainers, and a service with engines: each notes when it starts, and when trainers leave their devices."""

    def __init__(self, device: str):
        self.done, self.device = [], device
        self.frozen = self.evaluation_engines = SimpleNamespace(groups={})

    async def note(self, what: str) -> None:
        self.done.append(what)
        await asyncio.sleep(0)
        self.done.append(f"{what} done")

    async def start(self) -> None:
        await self.note("trainers")

    async def places(self) -> list[str]:
        await self.note("places")
        return ["gpu"]

    async def offload(self) -> None:
        await self.note("offload")

    def place(self, shared: list[str]) -> dict[str, SimpleNamespace]:
        assert shared == (["gpu"] if "places done" in self.done else [])
        return {"actor": SimpleNamespace(start=lambda: self.note("engines"))}


@pytest.mark.parametrize(("colocate", "device"), [(True, "cuda"), (True, "cpu"), (False, "cuda")])
async def test_colocated_engines_start_on_devices_that_trainers_have_left(tmp_path, monkeypatch, colocate, device):
    async def reached(*_: Any) -> None:
        """Reaches every engine."""

    async def timed(name: str, work: Any) -> None:
        await work()

    monkeypatch.setattr(session, "check_reach", reached)
    config, parts = config_of(tmp_path), StartedParts(device)
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"colocate": colocate})})
    await session.start_parts(config, {"actor": parts}, None, parts, timed)
    places = ["places", "places done"] if device == "cuda" else []
    if colocate:
        first = ["trainers", "trainers done", *places, "offload", "offload done"]
        assert parts.done == [*first, "engines", "engines done"]
    else:
        assert parts.done == ["trainers", "engines", "trainers done", "engines done"]


async def test_engines_of_evaluations_start_under_a_name_of_their_own(tmp_path, monkeypatch):
    async def reached(*_: Any) -> None:
        """Reaches every engine."""

    async def timed(name: str, work: Any) -> None:
        names.append(name)

    names: list[str] = []
    monkeypatch.setattr(session, "check_reach", reached)
    parts = StartedParts("cpu")
    parts.evaluation_engines = SimpleNamespace(groups={"actor": SimpleNamespace(start=None)})
    await session.start_parts(config_of(tmp_path), {"actor": parts}, None, parts, timed)
    assert names == ["trainers", "engines", "evaluation engines"]


async def test_a_start_that_is_refused_leaves_no_part_half_begun(tmp_path, unawaited):
    def place(shared: list[str]) -> dict[str, Any]:
        raise SlimxError("no place", code="place")

    parts = StartedParts("cpu")
    parts.place = place
    with refused("place"):
        await session.start_parts(config_of(tmp_path), {"actor": parts}, None, parts, asyncio.sleep)
    assert unawaited() == [] and not parts.done


@pytest.mark.parametrize(
    ("start", "code", "named"),
    [
        ({"resume": "must"}, "run.resume", "own/checkpoints"),
        ({"fork": "other"}, "run.fork", "iter_0000003"),
        ({"fork": "nowhere"}, "run.fork", "nowhere"),
    ],
)
def test_an_impossible_start_is_refused_before_models_are_read(tmp_path, monkeypatch, start, code, named):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "other", 2, 3)
    config = config_of(Path("own"))
    with refused(code) as caught:
        session.run_session(
            config.model_copy(update={"run": config.run.model_copy(update=start)}), Console(width=1000), None
        )
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("checkpoint", "removed", "figures"),
    [("c", 0, [80]), ("c", 2, [80, 2]), (None, 3, [3]), (None, 0, None)],
)
def test_a_resume_is_one_line_with_one_step(checkpoint, removed, figures):
    line = session.resume_line(checkpoint and Path(checkpoint), 80 if checkpoint else 0, removed)
    assert figures is None if line is None else numbers(line) == figures


def test_a_finished_run_names_the_new_settings_that_nothing_uses(tmp_path, monkeypatch, capsys):
    started = Started(monkeypatch, tmp_path)
    saved(tmp_path, 1)
    config = config_of(tmp_path)
    ended = config.model_copy(update={"schedule": config.schedule.model_copy(update={"steps": 1})})
    (tmp_path / "config.yaml").write_text(ended.to_text())
    assert "not used" not in run(ended, capsys)
    again = ended.model_copy(update={"run": ended.run.model_copy(update={"seed": 2})})
    assert "run.seed" in run(again, capsys) and not started.at
