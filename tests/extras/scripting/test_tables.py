"""Metrics and rollouts of a run are tables, and the result of a run is also the path of its directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slimx
from slimx.extras.scripting.result import RunResult
from slimx.extras.scripting.rows import SHOWN, WIDTH, Rows
from tests.extras.generation.serving_stand import write_model
from tests.extras.scripting.run_stand import write_run
from tests.refusals import refused


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", write_model(tmp_path / "model"))
    return tmp_path / "run"


def test_metrics_have_a_row_per_step_and_a_column_per_name(run: Path) -> None:
    table = slimx.metrics(run)
    assert table["step"] == [1, 2] and table["reward/mean"] == [0.25, 0.5] and table["eval/accuracy"] == [None, 0.5]
    assert table.columns == ["step", "version", "time", "reward/mean", "time/step", "loss/policy", "eval/accuracy"]
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
    assert slimx.rollouts(run, step=2, group="g")["group"] == ["g", "g"]
    for choice in ({"group": "g"}, {"reward_below": 0.0}):
        with refused("rollouts.options", about=next(iter(choice))):
            slimx.rollouts(run, **choice)
    with refused("rollouts.step", about="step 1"):
        slimx.rollouts(run, step=1)


@pytest.mark.parametrize("run", [5, None, ["runs/a"]])
def test_what_is_no_path_of_a_run_is_refused(run: Any) -> None:
    for read in (slimx.metrics, slimx.rollouts):
        with refused("script.run", about="run"):
            read(run)


@pytest.mark.parametrize("step", ["1", 1.5])
def test_a_step_that_is_no_whole_number_is_refused(run: Path, step: Any) -> None:
    with refused("rollouts.options", about="step"):
        slimx.rollouts(run, step)
    assert len(slimx.rollouts(run, np.int64(2))) == 2


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


def test_a_script_prints_the_values_of_a_table() -> None:
    table = Rows({"step": step, "reward/mean": step / 3, "text": "a\nb" * 50} for step in range(100))
    lines = str(table).split("\n")
    assert len(lines) == 1 + SHOWN + 1 + 1 and lines[0].split() == ["step", "reward/mean", "text"]
    assert lines[2].split()[:2] == ["1", "0.333333"] and lines[-2].split()[0] == "99" and max(map(len, lines)) <= WIDTH
    many = str(Rows([{f"metric{column}": 0 for column in range(60)}])).split("\n")
    assert max(map(len, many)) < 2 * WIDTH and "metric59" not in many[0] and "60 columns" in many[-1]
    assert str(Rows([{"time": 1796075718.1}])).split()[:2] == ["time", "1796075718"]
    assert str(Rows()) == "0 rows, 0 columns" and str(Rows([{}])) == "1 row, 0 columns"


def test_a_misspelt_column_is_answered_with_the_nearest(run: Path) -> None:
    with pytest.raises(KeyError) as caught:
        slimx.metrics(run)["reward/men"]
    assert "reward/mean" in str(caught.value) and "loss/policy" not in str(caught.value)
