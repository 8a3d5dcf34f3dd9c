"""Every card and chart of the report and of the live page says what it shows, of which steps, and what is good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimx.extras.report.cards import FIGURES, cards, other_cards
from slimx.extras.report.charts import PhaseColors, step_ticks
from slimx.extras.report.curves import curves
from slimx.extras.report.meanings import GOOD, about
from slimx.extras.report.panels import PANELS
from slimx.extras.report.phase_charts import phase_charts
from slimx.extras.report.previews import Shown
from slimx.extras.report.samples import marked, training_table
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.names import METRICS, find
from slimx.observability.tracking.phases import Phase
from slimx.observability.tracking.samples import RecordedSample
from slimx.orchestration.state.recording import summary

NAMED = (
    "reward/part/format/mean",
    "source/gsm8k/reward",
    "eval/gsm8k/accuracy",
    "hook/hits/mean",
    "policy/judge/reward/mean",
    "policy/judge/eval/accuracy",
    "policy/judge/loss/policy",
    "policy/judge/gap/mean",
)
"""One metric of each kind whose name is not fixed."""
MEMORY = "memory/train_peak_mib"


def record(step: int, **metrics: float) -> StepRecord:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepRecord(step=step, version=step, time=1e9 + step, metrics=named)


@pytest.fixture(scope="module")
def complete() -> list[StepRecord]:
    """Steps with every metric that has a card or a chart."""
    drawn = [series.key for panel in PANELS for series in panel.series]
    fixed = [figure.metric for figure in FIGURES if figure.metric in {metric.name for metric in METRICS}]
    names = dict.fromkeys([*drawn, *fixed, *NAMED, MEMORY], 0.5)
    return [StepRecord(step=step, version=step, time=1e9 + step, metrics=names) for step in range(3)]


def test_every_metric_of_a_card_or_chart_has_a_text(complete):
    charts, absent = curves(complete, points=100)
    phases = [Phase(name="train", step=step, track="main", start=1e9 + step, seconds=0.5) for step in range(2)]
    charts += phase_charts(phases, points=100, colors=PhaseColors())
    shown = [*(item for chart in charts for item in chart.about), *(card.about for card in cards(complete))]
    assert absent == [] and len(cards(complete)) == len(FIGURES)
    assert [chart.title for chart in charts if not chart.about] == []
    assert [item.metric for item in shown if not (item.meaning and item.good)] == []
    assert {item.metric for item in shown} >= complete[0].metrics.keys() - {"eval/failed"}
    for chart in charts:  # each curve has a text under the name that the legend has
        if len(chart.about) > 1:
            assert [item.label for item in chart.about] == [line.name for line in chart.figure.data]


def test_texts_belong_to_entries_of_the_table_of_metrics():
    assert GOOD.keys() <= {metric.name for metric in METRICS}
    assert about("reward/mean").meaning == find("reward/mean").meaning
    assert about("policy/judge/gap/mean").meaning == find("gap/mean").meaning
    assert about("critic/lr").meaning == find("optim/lr").meaning
    assert (about("critic/lr").section, about("policy/judge/gap/mean").section) == ("optim", "gap")
    assert about("mine/x").good == ""


def test_a_card_names_the_steps_of_its_figure():
    steps = [record(0, eval__accuracy=0.25)]
    steps += [record(n, reward__mean=n / 10, dropped__total=2.0, memory__train_peak_mib=9.0 - n) for n in range(1, 13)]
    steps[1].metrics |= {"memory/publish_peak_mib": 11.0}
    found = {card.about.metric: card for card in cards(steps)}
    assert found["reward/mean"].value == "0.75" and "10" in found["reward/mean"].scope
    assert found["reward/mean"].more == ["step 1: 0.1", "step 12: 1.2"]
    assert (found["eval/accuracy"].value, found["eval/accuracy"].scope) == ("0.25", "step 0")
    assert found["dropped/total"].value == "24" and found["dropped/total"].more == ["step 12: 2"]
    assert found["memory/publish_peak_mib"].value == "11" and MEMORY not in found
    assert "optim/skipped" not in found, "not skipped"


def test_a_step_without_a_number_hides_no_other():
    steps = [record(n, staleness__max=float("nan") if n == 1 else n, dropped__total=float("nan")) for n in (1, 2, 3)]
    steps[2].metrics["dropped/total"] = 2.0
    found = {card.about.metric: card.value for card in cards(steps)}
    assert found["staleness/max"] == "3" and found["dropped/total"] == "2"


def test_a_run_without_numbers_has_cards_too():
    found = cards([record(1, reward__mean=float("nan")), record(2, reward__mean=float("nan"))])
    assert [card.value for card in found] == ["nan"] and cards([]) == []
    assert cards([record(1, reward__mean=1.0)])[0].scope == "step 1"


def test_entries_of_a_summary_are_on_a_card_once(complete, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step.to_json()) + "\n" for step in complete))
    assert other_cards(summary(tmp_path), all_of_them=False) == []
    assert len(other_cards(summary(tmp_path), all_of_them=True)) == len(summary(tmp_path))
    assert [card.title for card in other_cards({"steps": 1, "mine": True}, all_of_them=False)] == ["mine"]


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 100, [20, 40, 60, 80, 100]),
        (0, 20, [0, 5, 10, 15, 20]),
        (0, 0, [0]),
        (1, 1, [1]),
        (1, 3, [1, 2, 3]),
        (0, 97, [0, 20, 40, 60, 80, 97]),
        (0, 91, [0, 20, 40, 60, 91]),
        (501, 1000, [600, 700, 800, 900, 1000]),
    ],
)
def test_ticks_are_round_and_contain_the_last_step(first: int, last: int, expected: list[int]):
    assert step_ticks(first, last) == expected


def test_each_axis_of_steps_ends_at_the_last_step(complete):
    steps = [record(number, **{"reward__mean": 1.0, "gap__mean": 0.0}) for number in range(1, 101)]
    phases = [Phase(name="train", step=step, track="main", start=1e9 + step, seconds=0.5) for step in range(1, 101)]
    charts, _ = curves(steps, points=30)
    charts += phase_charts(phases, points=30, colors=PhaseColors())[:1]
    assert len(charts) == 3
    for chart in charts:
        axis = json.loads(chart.figure.to_json())["layout"]["xaxis"]
        assert axis["tickvals"][-1] == 100 and axis["title"]["text"] == "step"
        assert axis["range"][0] < 1 and axis["range"][1] > 100


def test_an_answer_has_its_reward_its_parts_and_what_was_expected(tmp_path: Path):
    sample = RecordedSample(step=1, prompt="2+2=", answer="4", response="<4>", reward=0.5, version=1, evaluation=False)
    sample.reward_parts = {"exact": 0.0, "format": None}
    row = training_table([sample], lambda images: Shown(), passing=1.0)[0]["cell"]
    assert (row["passed"], row["reward"], row["parts"]) == (False, "0.5", "exact 0, format nan")
    assert row["answer"] == "4" and ("4", True) in row["response"]
    sample.reward_parts = None  # a run of an earlier version
    sample.answer = "4" * 999
    row = training_table([sample], lambda images: Shown(), passing=0.5)[0]["cell"]
    assert row["passed"] and row["parts"] == "" and len(row["answer"]) < 200


def test_an_expected_answer_is_found_as_a_whole_word():
    assert marked("15, 5 and 5.2 or 1,5. 5", "5") == [
        ("15, ", False),
        ("5", True),
        (" and 5.2 or 1,5. ", False),
        ("5", True),
    ]
    assert marked("so #### 42.", " 42 ") == [("so #### ", False), ("42", True), (".", False)]
    assert marked("<b>", None) == [("<b>", False)] and marked("", "4") == []
