"""`slimx.grpo` chooses a run's values for this machine, and writes the file that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import slimx
from slimx.commands import start
from slimx.errors import SlimxError
from slimx.extras.init.machine import Target
from slimx.extras.quickstart.make_model import make_model
from slimx.extras.scripting import grpo as room
from slimx.extras.scripting.rows import Rows
from slimx.observability.live.run_lock import locked
from slimx.orchestration.state.saves import Saves
from tests.refusals import refused
from tests.unit.orchestration.checkpointing_stand import state

ROWS = [{"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:02d}"} for a in range(8) for b in range(8)]


class Frame:
    """Iterates over its columns, as pandas.DataFrame does."""

    columns = ("prompt", "answer")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


def digits(ctx: slimx.RewardContext, trajectory: slimx.Trajectory) -> bool:
    return ctx.text.isdigit()


def leveled(completions: Any, level: Any, **columns: Any) -> list[float]:
    return [float(one) for one in level]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    make_model(out, seed=1)
    return out


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[slimx.Config]:
    """Configurations of the runs that would have been trained."""
    configs: list[slimx.Config] = []

    def train(config: slimx.Config, console: Console) -> tuple[Path, None]:
        configs.append(config)
        assert Path(config.rollout.prompts).exists()
        return Path(config.run.dir), None

    monkeypatch.setattr(start, "train", train)
    monkeypatch.setattr(room, "target", lambda *_: Target(None, 0, 1, 0))
    monkeypatch.chdir(tmp_path)
    return configs


def quiet(*arguments: Any, **keywords: Any) -> Any:
    return slimx.grpo(*arguments, console=Console(quiet=True), **keywords)


def test_three_lines_stand_for_a_file_that_anyone_can_start(model: Path, started: list[slimx.Config]):
    overrides = {"trainer.optimizer.lr": 2e-3, "rollout.engines.0.max_total_tokens": 4096, "algorithm.loss.high": 0.3}
    result = quiet(model, ROWS, digits, steps=3, overrides=overrides, eval=ROWS[:4])
    (config,) = started
    assert slimx.load_config(result / "grpo.yaml") == config and str(result) == "runs/grpo"
    assert (config.schedule.steps, config.trainer.optimizer.lr, config.algorithm.loss.high) == (3, 2e-3, 0.3)
    assert config.reward.function == f"{__name__}.digits" and config.rollout.engines[0].max_total_tokens == 4096
    assert len(Path(config.rollout.prompts).read_text().splitlines()) == len(ROWS) and config.eval.files
    assert "  # " in (result / "grpo.yaml").read_text()


def test_a_second_call_is_another_run_unless_it_names_the_directory(model: Path, started: list[slimx.Config]):
    names = [str(quiet(model, ROWS, digits)), str(quiet(model, ROWS)), str(quiet(model, ROWS, directory="runs/grpo"))]
    assert names == ["runs/grpo", "runs/grpo-2", "runs/grpo"] and started[1].reward.function == "exact"


def test_prompts_may_be_a_file_texts_or_rows_of_any_iterable(model: Path, started: list[slimx.Config], tmp_path: Path):
    quiet(model, ROWS, digits)
    file = started[0].rollout.prompts
    for prompts in (file, Path(file), (row["prompt"] for row in ROWS), tuple(ROWS), Rows(ROWS)):
        quiet(model, prompts, digits)
    assert [config.rollout.prompts for config in started[1:3]] == [file, file] and len(started) == 6


@pytest.mark.parametrize(
    ("prompts", "reward", "code"),
    [
        ([1, 2], digits, "script.prompts"),
        ({"prompt": ["a"], "answer": ["1"]}, digits, "script.prompts"),
        (Frame(), digits, "script.prompts"),
        (None, digits, "script.prompts"),
        ([{"prompt": object()}], digits, "script.prompts"),
        ([{"prompt": "\ud800"}], digits, "script.prompts"),
        ([], digits, "prompts.empty"),
        ("nothing.jsonl", digits, "prompts.unreadable"),
        ([{"prompt": "a"}] * 8, None, "script.reward"),
        (ROWS, lambda ctx, trajectory: 1.0, "script.hook"),
        (ROWS, [digits, digits], "script.hook"),
        (ROWS, "", "script.hook"),
        ({"train": ROWS, "test": ROWS}, digits, "script.prompts"),
        (7, digits, "script.prompts"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_no_files(
    model: Path, started: list[slimx.Config], prompts: Any, reward: Any, code: str
):
    with refused(code, about=None):
        quiet(model, prompts, reward)
    assert not Path("runs/grpo").exists() and not started


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("num_generations", 4, "rollout.group_size=4"),
        ("reward_funcs", [digits], "reward="),
        ("train_dataset", ROWS, "prompts="),
        ("max_steps", 3, " steps="),
        ("args", {}, " overrides= "),
    ],
)
def test_an_argument_of_another_framework_is_refused_with_that_to_use(
    model: Path, started: list[slimx.Config], name: str, value: Any, instead: str
):
    with refused("script.argument", about=name) as refusal:
        quiet(model, ROWS, digits, **{name: value})
    assert instead in str(refusal.value) and not started


def test_a_number_of_steps_may_be_one_of_numpy(model: Path, started: list[slimx.Config]):
    result = quiet(model, ROWS, digits, steps=np.int64(3))
    assert slimx.load_config(result / "grpo.yaml").schedule.steps == started[0].schedule.steps == 3


@pytest.mark.parametrize("steps", [0, -1, "10", 1.5, None])
def test_a_number_of_steps_that_is_none_is_refused(model: Path, started: list[slimx.Config], steps: Any):
    with refused("script.steps", about="steps"):
        quiet(model, ROWS, digits, steps=steps)
    assert not started


def test_a_reward_gets_the_further_columns_of_all_rows(model: Path, started: list[slimx.Config]):
    rows = [{"prompt": row["prompt"], "solution": row["answer"], "level": 3, "dataset": "b"} for row in ROWS]
    rows[0] |= {"note": "of one row"}
    quiet(model, rows, leveled, eval=ROWS)
    (config,) = started
    assert config.rollout.fields and config.rollout.fields.metadata == ("solution", "level")
    assert config.eval.fields and config.eval.fields.metadata == ()
    quiet(model, rows)
    assert started[1].rollout.fields and started[1].rollout.fields.metadata == ()


def test_a_thread_is_refused_and_leaves_no_files(model: Path, started: list[slimx.Config]):
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as threads, refused("script.thread", about="mine_0"):
        threads.submit(quiet, model, ROWS, digits).result()
    assert not Path("runs/grpo").exists() and not started


def test_checks_are_announced_before_they_take_time(model: Path, started: list[slimx.Config], capsys: Any):
    with refused("prompts.unreadable", about=None):
        slimx.grpo(model, "nothing.jsonl", digits)
    assert capsys.readouterr().out.split()[:2] == ["checking", str(model)]


def test_a_directory_with_other_files_is_kept_after_a_refusal(model: Path, started: list[slimx.Config]):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("")
    with pytest.raises(SlimxError):
        quiet(model, ROWS, digits, directory="mine", overrides={"schedule.steps": 0})
    assert Path("mine/notes.txt").exists()


def test_an_empty_directory_is_empty_after_a_refusal(model: Path, started: list[slimx.Config]):
    Path("mine").mkdir()
    with refused("prompts.type", about=None):
        quiet(model, [{"prompt": "a", "answer": "1"}, {"prompt": 5, "answer": "1"}], digits, directory="mine")
    assert not [*Path("mine").iterdir()]


def test_another_directory_among_the_overrides_is_refused(model: Path, started: list[slimx.Config]):
    with refused("script.directory", about="run.dir"):
        quiet(model, ROWS, digits, overrides={"run.dir": "elsewhere"})
    assert not Path("runs").exists() and not Path("elsewhere").exists() and not started
    quiet(model, ROWS, digits, directory="mine", overrides={"run.dir": "./mine/"})


def contents(directory: Path) -> dict[str, bytes]:
    """Returns all files in `directory` with their bytes."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.fixture
def run(model: Path, started: list[slimx.Config]) -> Path:
    """A run that `grpo` has begun."""
    result = quiet(model, ROWS, digits, eval=ROWS[:4], directory="runs/mine")
    started.clear()
    return Path(result)


def test_a_refused_call_leaves_every_file_as_it_was(
    model: Path, started: list[slimx.Config], run: Path, monkeypatch: pytest.MonkeyPatch
):
    before = contents(run)
    other = [{**row, "answer": "7"} for row in ROWS]

    def again(code: str, model: Any = model, reward: Any = digits, **keywords: Any) -> None:
        with refused(code, about=None):
            quiet(model, other, reward, eval=other[:2], directory=run, **keywords)
        assert contents(run) == before and not started

    again("model.directory", model="nowhere")
    again("script.hook", reward=lambda ctx, trajectory: 1.0)
    again("run.fork", overrides={"run.fork": "nowhere"})
    monkeypatch.setattr("multiprocessing.process._current_process._inheriting", True, raising=False)
    again("script.main")
    monkeypatch.delattr("multiprocessing.process._current_process._inheriting")

    def refuse(config: slimx.Config, console: Console) -> Any:
        assert contents(run) != before
        raise SlimxError("refused late", code="late")

    monkeypatch.setattr(start, "train", refuse)
    again("late")
    with locked(run):
        before = contents(run)
        again("run.locked")


@pytest.mark.parametrize("begins", [True, False])
def test_ctrl_c_before_the_run_leaves_every_file_as_it_was(
    model: Path, started: list[slimx.Config], run: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
):
    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    before = contents(run)
    if begins:
        monkeypatch.setattr(start, "train", interrupt)
    else:
        monkeypatch.setattr(room, "checked_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quiet(model, ROWS[:32], digits, eval=ROWS[:3], directory=run)
    assert contents(run) == before


def test_a_locked_directory_keeps_rows_that_the_other_process_may_read(
    model: Path, started: list[slimx.Config], monkeypatch: pytest.MonkeyPatch
):
    def refuse(config: slimx.Config, console: Console) -> Any:  # the other process passed the same rows
        raise SlimxError("another process is training", code="run.locked")

    monkeypatch.setattr(start, "train", refuse)
    with refused("run.locked", about=None):
        quiet(model, ROWS, digits, directory="runs/both")
    assert len([*Path("runs/both").rglob("prompts.jsonl")]) == 1


def test_a_run_that_has_begun_keeps_its_new_files(
    model: Path, started: list[slimx.Config], run: Path, monkeypatch: pytest.MonkeyPatch
):
    def lose(config: slimx.Config, console: Console) -> Any:
        (run / "logs").mkdir()
        (run / "logs" / "trainer-0.log").write_text("begun")
        raise SlimxError("lost", code="lost")

    monkeypatch.setattr(start, "train", lose)
    before = contents(run)
    with refused("lost", about=None):
        quiet(model, ROWS[:32], digits, eval=ROWS[:4], directory=run)
    added = contents(run).keys() - before.keys()
    assert any(Path(path).name == "prompts.jsonl" for path in added) and contents(run) | before != contents(run)


def test_a_finished_run_keeps_its_files(model: Path, started: list[slimx.Config], run: Path):
    saves = Saves(run / "checkpoints", keep=1)
    saves.commit(saves.begin(3), state(3).files(), {})
    before = contents(run)
    quiet(model, ROWS[:32], digits, directory=run, steps=3, overrides={"checkpoint.export_hf": False})
    assert contents(run) == before and len(started) == 1


def test_two_calls_at_the_same_time_get_two_directories(
    model: Path, started: list[slimx.Config], monkeypatch: pytest.MonkeyPatch
):
    real = room.examine

    def examine(path: str, model: str) -> Any:  # between the choice of the directory and its first file
        monkeypatch.setattr(room, "examine", real)
        assert str(quiet(model, ROWS, digits)) == "runs/grpo-2"
        return real(path, model)

    monkeypatch.setattr(room, "examine", examine)
    assert str(quiet(model, ROWS, digits)) == "runs/grpo"


def test_another_call_leaves_the_rows_of_a_starting_run_as_they_are(
    model: Path, started: list[slimx.Config], run: Path, monkeypatch: pytest.MonkeyPatch
):
    read = []
    lock = locked(run)

    def second(config: slimx.Config, console: Console) -> Any:
        lock.__enter__()  # the first call is faster, so that the second cannot undo what it has written
        raise SlimxError("the first call trains", code="run.locked")

    def first(config: slimx.Config, console: Console) -> Any:  # before it locks the run
        monkeypatch.setattr(start, "train", second)
        with refused("run.locked", about=None):
            quiet(model, ROWS[32:], digits, directory=run)
        read.append(Path(config.rollout.prompts).read_text())
        return run, None

    monkeypatch.setattr(start, "train", first)
    quiet(model, ROWS[:32], digits, directory=run)
    lock.__exit__(None, None, None)
    assert len(read) == 1 and ROWS[0]["prompt"] in read[0] and ROWS[32]["prompt"] not in read[0]


def test_rows_that_a_run_reads_are_replaced_by_no_later_call(model: Path, started: list[slimx.Config], run: Path):
    for rows in (ROWS[:32], ROWS[32:], ROWS[:32]):
        quiet(model, rows, digits, directory=run)
    files = [Path(config.rollout.prompts) for config in started]
    assert files[0] == files[2] != files[1] and ROWS[0]["prompt"] in files[0].read_text()
    assert len([*run.rglob("prompts.jsonl")]) == 3, "with that of the fixture"


@pytest.mark.parametrize("name", ["file", "file/run", "a" * 300])
def test_a_directory_that_cannot_be_created_is_refused(model: Path, started: list[slimx.Config], name: str):
    Path("file").write_text("")
    with refused("script.directory", about=name):
        quiet(model, ROWS, digits, directory=name)


def test_an_edited_file_of_rows_is_not_trained_on(model: Path, started: list[slimx.Config], run: Path):
    (file,) = run.rglob("prompts.jsonl")
    rows = file.read_bytes()
    file.write_bytes(rows[: len(rows) // 2])
    before = contents(run)
    with refused("run.fork", about=None):
        quiet(model, ROWS, digits, directory=run, overrides={"run.fork": "nowhere"})
    assert contents(run) == before
    quiet(model, ROWS, digits, directory=run)
    assert file.read_bytes() == rows


def test_an_error_about_rows_names_the_file_of_the_run(model: Path, started: list[slimx.Config]):
    with pytest.raises(SlimxError) as raised:
        quiet(model, [{"prompt": "a", "answer": "1"}, {"prompt": 5, "answer": "1"}], digits, directory="runs/bad")
    assert "runs/bad/rows/" in str(raised.value) and not Path("runs").exists()
