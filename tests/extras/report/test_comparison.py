"""A comparison of runs: a curve per run in each chart, values over other axes, final values, different settings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from slimx.config.schema import CHECKED, Config
from slimx.extras.report.comparison import _flat, config_rows, overlaid, run_names, value_rows, x_axes
from slimx.extras.report.report import write_comparison
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.run_files import read_run
from tests.extras.report.test_observability_report import Page, grpo_run, sft_run, write_lines
from tests.refusals import refused


def run_of(directory: Path, steps: int, *, config: str = "", **metrics: float) -> Path:
    """Writes a run whose metrics grow by the given value at each step."""
    directory.mkdir(parents=True)
    records = []
    for step in range(1, steps + 1):
        values = {name.replace("__", "/"): value * step for name, value in metrics.items()}
        values |= {"time/step": 30.0, "perf/tokens_per_second": 10.0}
        records.append(StepRecord(step=step, version=step, time=1e9 + step, metrics=values).to_json())
    write_lines(directory / "metrics.jsonl", records)
    (directory / "config.yaml").write_text(config or "run: {name: r}\nschedule: {steps: 9}\n")
    return directory


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Runs of the same name and of different lengths, each with a metric that the other lacks."""
    settings = (
        "run:\n  name: {name}\nschedule: {{steps: 9}}\nrollout:\n  prompts_per_step: {prompts}\n  group_size: 4\n"
    )
    first = settings.format(name="a", prompts=8) + "  engines: [{name: actor, gpus: 1}]\n"
    second = settings.format(name="b", prompts=2) + "  engines: [{name: actor, gpus: 2}]\neval: {every: 5}\n"
    return [
        run_of(tmp_path / "a" / "run", 40, config=first, reward__mean=0.01, loss__policy=0.1, gap__mean=1e-7),
        run_of(tmp_path / "b" / "run", 12, config=second, reward__mean=0.02, policy__entropy=0.1, gap__mean=0.0),
    ]


def records(directories: list[Path]) -> list[list[StepRecord]]:
    return [read_run(directory).steps for directory in directories]


def test_each_chart_has_a_curve_for_every_run_with_the_metric(two):
    charts = {chart.about[0].metric: chart for chart in overlaid(records(two), ["a", "b"])}
    assert charts.keys() == {"reward/mean", "loss/policy", "policy/entropy", "gap/mean", "perf/tokens_per_second"}
    shown = {key: [line.name for line in chart.figure.data if line.showlegend] for key, chart in charts.items()}
    assert shown["loss/policy"] == ["a"] and shown["policy/entropy"] == ["b"]
    assert shown["reward/mean"] == shown["perf/tokens_per_second"] == ["a", "b"]
    assert [charts[key].figure.layout.xaxis.tickvals[-1] for key in ("reward/mean", "policy/entropy")] == [40, 12]
    colors = {(line.name, line.line.color) for line in charts["reward/mean"].figure.data}
    assert len(colors) == 2 and [line.meta for line in charts["policy/entropy"].figure.data] == [1]
    assert any("b" in note for note in charts["loss/policy"].notes)


def test_values_of_other_axes_are_sums_over_the_run(two):
    first, second = (x_axes(read_run(directory)) for directory in two)
    assert first["step"][-1] == 40 and first["minutes"][-1] == 20 and first["tokens"][-1] == 40 * 300
    assert first["samples"][-1] == 40 * 32 and second["samples"] == [8.0 * step for step in range(1, 13)]


def test_a_run_without_a_configuration_or_steps_has_no_other_axes(tmp_path):
    run = run_of(tmp_path / "run", 2, reward__mean=1.0)
    (run / "config.yaml").write_text("run: [")
    assert x_axes(read_run(run))["samples"] is None
    (run / "metrics.jsonl").write_text("")
    assert x_axes(read_run(run)) == {"step": [], "minutes": None, "tokens": None, "samples": None}
    assert config_rows([read_run(run)] * 2) == ([], []) and value_rows([read_run(run)] * 2) == []


def test_final_and_best_values_name_the_run_that_leads(two):
    rows = {row["metric"]: row["cells"] for row in value_rows([read_run(directory) for directory in two])}
    reward = rows["reward/mean"]
    assert reward[0] == {"final": "0.355", "best": "0.4 (step 40)", "leads": True}
    assert reward[1] == {"final": "0.15", "best": "0.24 (step 12)", "leads": False}
    assert rows["gap/mean"][1]["leads"] and rows["loss/policy"][1] is None and rows["policy/entropy"][0] is None


def test_only_settings_that_differ_are_listed(two):
    written, others = config_rows([read_run(directory) for directory in two])
    assert others == [], "a configuration that this version does not accept is shown as it is"
    assert dict(written) == {
        "rollout.prompts_per_step": ["8", "2"],
        "rollout.engines.0.gpus": ["1", "2"],
        "eval.every": ["not set", "5"],
    }


def test_settings_of_a_user_come_before_those_that_follow_from_them(tmp_path):
    grpo = run_config(tmp_path, {"name": "grpo"}, engines=[{"max_total_tokens": 4096}])
    sft = run_config(tmp_path, {"name": "sft"}, engines=[], lr=1e-3)
    runs = [run_of(tmp_path / name, 2, config=text) for name, text in (("a", grpo), ("b", sft))]
    written, others = config_rows([read_run(run) for run in runs])
    rows = dict(written)
    assert rows.keys() == {"trainer.optimizer.lr", "rollout.engines.0.max_total_tokens", "algorithm.name"}
    assert rows["rollout.engines.0.max_total_tokens"] == ["4096", "not set"]
    assert len(others) > 10 and {"rollout.engines.0.tensor", "algorithm.loss.kind"} <= {key for key, _ in others}


def run_config(directory: Path, algorithm: dict, *, engines: list, lr: float = 1e-6) -> str:
    """Returns the whole configuration of a run, defaults included, as its directory has it."""
    values = {
        "run": {"name": "r", "dir": str(directory)},
        "model": {"path": str(directory)},
        "trainer": {"optimizer": {"lr": lr}},
        "rollout": {"prompts": "prompts.jsonl", "engines": engines},
        "algorithm": algorithm,
    }
    return Config.model_validate(values, context=CHECKED).to_text()


def test_keys_of_a_comparison_are_those_of_overrides():
    nested = {"eval": {"prompts": {"": {"path": "heldout.jsonl"}}}, "rollout": {"engines": [{"count": 2}]}}
    assert _flat(nested) == {"eval.prompts.path": "heldout.jsonl", "rollout.engines.0.count": "2"}


def test_runs_of_one_name_are_told_apart_by_their_folders(two, tmp_path):
    assert run_names(two) == ["a/run", "b/run"]
    assert run_names([*two, tmp_path / "c"]) == ["a/run", "b/run", "c"]


def test_one_run_and_a_run_given_twice_are_refused(two, tmp_path):
    out = tmp_path / "report.html"
    with refused("report.compare", about=str(two[0])):
        write_comparison(two[:1], out, None)
    with refused("report.compare", about=str(two[0].resolve())):
        write_comparison([*two, two[0]], out, None)
    with refused("run.none", about=str(tmp_path / "none")):
        write_comparison([two[0], tmp_path / "none"], out, None)
    assert not out.exists()


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> str:
    """Compares runs of different kinds, one of them with hostile text in its settings and its name."""
    root = tmp_path_factory.mktemp("comparison")
    evil = "<img src=x onerror=alert(1)>"
    runs = [grpo_run(root / "grpo"), sft_run(root / evil)]
    (runs[0] / "config.yaml").write_text(f"algorithm: '{evil}'\n")
    write_comparison(runs, root / "report.html", None)
    return (root / "report.html").read_text()


def test_a_comparison_is_one_file_without_markup_of_the_runs(html):
    for tag, attributes in Page(html).tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img"), tag
        assert not attributes.get("src")
    assert Page(html).text.count("<img src=x onerror=alert(1)>") >= 3 and len(html.encode()) < 1e6


@pytest.mark.needs("chromium")
def test_a_browser_draws_a_comparison_over_another_axis(html, tmp_path):
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    drawn = subprocess.run(
        [
            "chromium",
            *options,
            "--virtual-time-budget=10000",
            "--dump-dom",
            f"file://{tmp_path}/report.html#over=minutes",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    charts = re.split('class="plotly-graph-div js-plotly-plot"', drawn)[1:]
    assert len(charts) == html.count('class="plotly-graph-div"') > 5
    titles = re.findall(r'class="xtitle"[^>]*>([^<]*)<', drawn)
    assert len(titles) == len(charts) and {*titles} == {"minutes of training"}


def test_axes_are_numbers(html):
    axes = json.loads(re.search(r'id="axes">([^<]*)<', html)[1])
    assert [len(run["step"]) for run in axes] == [60, 80]
