"""Charts of the report: curves, phases and how their values are written."""

import math

import pytest

from slimx.extras.report.charts import OTHERS, PHASES, PhaseColors
from slimx.extras.report.curves import curves
from slimx.extras.report.meanings import shown
from slimx.extras.report.phase_charts import phase_charts
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.phases import Phase
from tests.extras.report.test_observability_report import START
from tests.refusals import numbers


def panel(charts, title):
    return next(chart for chart in charts if chart.title.startswith(title))


def records(values: list[float], key: str) -> list[StepRecord]:
    return [StepRecord(step=i, version=i, time=START + i, metrics={key: value}) for i, value in enumerate(values)]


def test_metrics_of_hooks_and_rewards_are_plotted_by_name():
    metrics = {"reward/part/math/mean": 0.5, "reward/part/format/mean": 0.1, "reward/part/math/std": 0.2}
    metrics |= {"source/gsm8k/reward": 0.7, "hook/tool_calls/mean": 1.5, "hook/tool_calls/count": 8.0}
    charts, _ = curves([StepRecord(step=s, version=s, time=START, metrics=metrics) for s in range(3)], points=100)
    drawn = {chart.title: {line.name: line.y[0] for line in chart.figure.data} for chart in charts}
    assert drawn == {
        "Parts of the reward, mean": pytest.approx({"format": 0.1, "math": 0.5}),
        "Reward by data set": pytest.approx({"gsm8k": 0.7}),
        "Logged by a hook: tool_calls": {"mean": 1.5},
    }


def test_a_phase_has_one_color_in_all_charts_of_a_page():
    colors, seen = PhaseColors(), {}
    for names in (("generate", "train", "simulate"), ("train", "grade", "simulate")):
        phases = [Phase(name=name, step=1, track="main", start=START + i, seconds=1.0) for i, name in enumerate(names)]
        for chart in phase_charts(phases, points=100, colors=colors):
            for bar in chart.figure.data:
                assert seen.setdefault(bar.name, bar.marker.color) == bar.marker.color
    assert len(set(seen.values())) == len(seen) == 4
    assert len({*PHASES.values(), *OTHERS}) == len(PHASES) + len(OTHERS)


def test_an_exact_zero_gap_is_drawn_on_the_log_axis():
    charts, absent = curves(records([0.0, 1e-6, 0.0], "gap/mean"), points=100)
    chart = panel(charts, "Log-prob gap")
    zeros, positive = chart.figure.data
    assert list(zeros.x) == [0, 2] and 0 < zeros.y[0] < 1e-6
    assert [value for value in positive.y if not math.isnan(value)] == pytest.approx([1e-6])
    assert numbers(chart.notes[0]) == [0, 2, 3], "the value; points that have it, and all"
    assert "Gradient norm" in absent


def test_numbers_that_are_not_finite_are_named_by_step():
    charts, _ = curves(records([1.0, math.inf, 2.0, math.nan], "loss/policy"), points=100)
    (line,) = panel(charts, "Loss").figure.data
    assert math.isnan(line.y[1]) and not line.connectgaps
    (note,) = panel(charts, "Loss").notes
    assert note.startswith("loss/policy ") and numbers(note) == [2, 4, 1, 3], "how many of how many steps, and which"


def test_a_long_curve_is_averaged_and_says_so():
    charts, _ = curves(records([float(i % 2) for i in range(1000)] + [9.0], "optim/grad_norm"), points=300)
    (line,) = panel(charts, "Gradient").figure.data
    assert len(line.y) == 300 and line.x[-1] == 1000 and 2 < line.y[-1] < 4  # (0 + 1 + 0 + 9) / 4
    (note,) = panel(charts, "Gradient").notes
    assert note.startswith("policy: ") and numbers(note) == [3, 4], "steps of one point"
    charts, _ = curves(records([0.0] * 500 + [3.0] + [0.0] * 500, "staleness/max"), points=100)
    assert max(panel(charts, "Staleness").figure.data[0].y) == 3  # a peak survives


def test_a_stacked_bar_adds_up_to_the_time_of_its_step():
    phases = [
        Phase(name="step", step=1, track="main", start=START, seconds=10.0),
        Phase(name="train", step=1, track="main", start=START + 1, seconds=6.0),
        Phase(name="optimizer", step=1, track="main", start=START + 2, seconds=2.0),
    ]
    bars, _ = phase_charts(phases, points=100, colors=PhaseColors())
    assert {bar.name: bar.y[0] for bar in bars.figure.data} == pytest.approx(
        {"step, rest": 4.0, "train, rest": 4.0, "optimizer": 2.0}, abs=1e-4
    )


def test_a_phase_of_no_step_is_in_the_legend_of_the_bars_once():
    phases = [
        Phase(name="train", step=1, track="main", start=START, seconds=4.0),
        Phase(name="checkpoint", step=None, track="checkpoint", start=START + 1, seconds=2.0),
        Phase(name="start", step=None, track="main", start=START - 50, seconds=9.0),
    ]
    bars, gantt = phase_charts(phases, points=100, colors=PhaseColors())
    assert not gantt.figure.layout.showlegend
    named = {bar.name: bar.marker.color for bar in bars.figure.data}
    assert named == {bar.name: bar.marker.color for bar in gantt.figure.data} and named.keys() == {
        "train",
        "checkpoint",
    }


def test_a_lone_curve_needs_a_title_and_no_legend():
    charts, _ = curves(records([0.5, 0.25], "optim/grad_norm"), points=100)
    (chart,) = charts
    assert (chart.title, chart.figure.layout.showlegend) == ("Gradient norm", False)
    both, _ = curves([*records([0.5, 0.25], "optim/grad_norm"), *records([1.0], "critic/grad_norm")], points=100)
    assert both[0].figure.layout.showlegend and [line.name for line in both[0].figure.data] == ["policy", "critic"]


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("recovery/seconds", 75.0, "1.25 min"),
        ("loss/policy", -0.0, "0"),
        ("time/step", 0.9814, "981 ms"),
        ("policy/judge/time/train", 200.0, "3.33 min"),
        ("publish/total_seconds", 12.345, "12.3 s"),
        ("time/step", math.nan, "nan"),
        ("reward/mean", 0.91015625, "0.91"),
        ("memory/train_peak_mib", 924.1, "924"),
        ("perf/tokens_per_second", 12345.6, "12,346"),
        ("perf/tokens_per_second", 999.7, "1,000"),
    ],
)
def test_values_have_three_digits_and_durations_a_unit(metric, value, text):
    assert shown(metric, value) == text


def test_the_last_steps_are_drawn_by_track():
    phases = [
        Phase(name=name, step=step, track=track, start=START + 10 * step + offset, seconds=8.0)
        for step in range(20)
        for name, track, offset in (("generate", "rollout", 0), ("train", "main", 5))
    ]
    _, gantt = phase_charts(phases, points=100, colors=PhaseColors())
    assert numbers(gantt.title) == [6]
    assert set(gantt.figure.layout.yaxis.ticktext) == {"rollout", "main"}
    words = {word.partition(":")[0] for bar in gantt.figure.data for word in bar.customdata}
    assert words == {f"step {step}" for step in range(14, 20)}
