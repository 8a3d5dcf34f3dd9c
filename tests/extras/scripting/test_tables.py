"""Metrics and rollouts of a run are tables, and the result of a run is also the path of its directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import slimx
from slimx.data.records import Group
from slimx.data.saved.step_files import StepFiles, origin_of
from slimx.extras.scripting.result import RunResult
from slimx.extras.scripting.rows import SHOWN, Rows
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord
from slimx.orchestration.state.directory import write_config
from tests.extras.generation.serving_stand import config_in, write_model
from tests.extras.rewards.reward_stand import trajectory
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import prompts, the_tokenizer


def made_group() -> Group:
    made = [trajectory(sampled) for sampled in (1, 3)]
    made[0].reward, made[1].reward = 1.0, -0.5
    return Group(id="g", prompt=prompts()[0], trajectories=made)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, of which the second has saved rollouts."""
    directory = tmp_path / "run"
    directory.mkdir()
    config = config_in(directory, write_model(tmp_path / "model"))
    write_config(config, directory)
    file = JsonlFile(directory / "metrics.jsonl", resume_step=0)
    for step in (1, 2):
        metrics = {"reward/mean": step / 4, "loss/policy": float("nan")} | ({"eval/accuracy": 0.5} if step == 2 else {})
        file.write(StepRecord(step=step, version=step - 1, time=0.0, metrics=metrics).to_json())
    file.close()
    origin = origin_of(config, the_tokenizer())
    StepFiles(directory / "rollouts", origin, every=1, keep=0, resume_step=0).write(2, 1, [made_group()], {})
    return directory


def test_metrics_have_a_row_per_step_and_a_column_per_name(run: Path) -> None:
    table = slimx.metrics(run)
    assert table["step"] == [1, 2] and table["reward/mean"] == [0.25, 0.5] and table["eval/accuracy"] == [None, 0.5]
    assert table.columns == ["step", "version", "time", "reward/mean", "loss/policy", "eval/accuracy"]
    assert np.isnan(table[-1]["loss/policy"]) and table[:1] == [table[0]] and type(table[:1]) is Rows
    assert table[["step", "eval/accuracy"]] == [{"step": 1, "eval/accuracy": None}, {"step": 2, "eval/accuracy": 0.5}]
    with pytest.raises(KeyError, match="reward/mean"):
        _ = table["reward/maen"]


def test_rollouts_have_a_row_per_saved_step_or_per_response(run: Path) -> None:
    (step,) = slimx.rollouts(run)
    assert (step["step"], step["trajectories"]) == (2, 2)
    responses = slimx.rollouts(RunResult(run, None), step=2)
    assert responses["reward"] == [1.0, -0.5] and responses["tokens"] == [1, 3]
    assert {"prompt", "response", "tokens", "advantage"} < {*responses.columns}
    assert slimx.rollouts(run, step=2, reward_below=0)["reward"] == [-0.5]
    with refused("rollouts.step", about="step 1"):
        slimx.rollouts(run, step=1)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    for read in (slimx.metrics, slimx.rollouts):
        with refused("run.none", about=str(tmp_path)):
            read(tmp_path)


def test_a_result_is_the_path_of_its_directory(run: Path) -> None:
    result = RunResult(run, run / "report.html")
    assert Path(result) == run and str(result) == os.fspath(result) == str(run) and (result / "config.yaml").is_file()
    assert result.metrics["step"] == [1, 2] and result.rollouts()["step"] == [2] and result.rollouts(2)
    assert result.report == run / "report.html" and str(run) in repr(result)


def test_a_notebook_shows_tables_without_their_markup() -> None:
    shown = Rows({"step": step, "text": "<b>&"} for step in range(100))._repr_html_()
    assert shown.count("<tr>") == SHOWN + 2 and "<b>" not in shown and "&lt;b&gt;&amp;" in shown
    assert "<td>0</td>" in shown and "<td>99</td>" in shown and "<td>50</td>" not in shown
    assert repr(Rows([{f"m{column}": 0 for column in range(60)}])).count("m") < 20
