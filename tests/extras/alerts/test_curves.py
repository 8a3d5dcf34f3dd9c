"""A healthy run gives no alert; each illness opens one alert, once, which closes when the illness is over."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from slimx.extras.alerts.curves.history import START, USUAL, noise
from slimx.extras.alerts.curves.no_signal import SILENT_STEPS
from slimx.extras.alerts.curves.watch import Curves
from tests.extras.alerts.curve_stand import GROUPS, HEALTHY, changes, longer

BEGINS = 60
LASTS = 60
Row = dict[str, float]


ILLNESSES: dict[str, Callable[[Row, int], Row]] = {
    "no_signal": lambda row, step: {
        "reward/groups_without_signal": 0.5,
        "optim/grad_norm": 0.0,
        "optim/steps_without_signal": float(step + 1),
    },
    "gap": lambda row, step: {"gap/mean": row["gap/mean"] * 1.3 ** min(step, 40)},
    "reward_fell": lambda row, step: {"reward/mean": row["reward/mean"] * 0.4},
    "entropy": lambda row, step: {
        "policy/entropy": 0.01,
        "reward/groups_without_signal": 0.95,
        "reward/std": 0.45,
    },
    "truncated": lambda row, step: {"response/truncated": min(0.4, 0.02 * step)},
    "stale": lambda row, step: {"staleness/mean": 1.7},
    "drops": lambda row, step: {"dropped/total": 9.0, "dropped/generate_failed": 8.0, "dropped/filter_easy": 1.0},
    "heldout_fell": lambda row, step: {"eval/accuracy": 0.3} if "eval/accuracy" in row else {},
}


def diseased(name: str, prefix: str = "") -> list[Row]:
    """The healthy run with an illness from row BEGINS on, which is over after LASTS rows."""
    rows = []
    for index, row in enumerate(longer(HEALTHY, 260)):
        step = index - BEGINS
        if name == "heldout_fell" and index % 5 == 0:
            row = row | {"eval/accuracy": 0.9 + 0.01 * (index % 3)}
        if 0 <= step < LASTS:
            row = row | ILLNESSES[name](row, step)
        elif name in ("no_signal", "drops"):
            row = row | {"optim/steps_without_signal": 0.0}
        rows.append({prefix + key: value for key, value in row.items()})
    return rows


def test_a_healthy_run_gives_no_alert():
    assert changes(HEALTHY) == []
    assert changes(list(longer(HEALTHY, 1000))) == []


@pytest.mark.parametrize("name", ILLNESSES)
def test_an_illness_opens_one_alert_that_closes_when_it_is_over(name):
    (opened, opens, *first), (closed, stays, *second) = changes(diseased(name))
    assert (opens, stays) == (True, False) and first == second == [name, ""]
    assert BEGINS < opened < BEGINS + LASTS <= closed < BEGINS + LASTS + 30


@pytest.mark.parametrize("name", [name for name in ILLNESSES if name not in ("drops", "heldout_fell")])
def test_an_alert_of_another_policy_names_the_policy(name):
    assert {change[2:] for change in changes(diseased(name, "policy/solver/"))} == {(name, "policy/solver")}


@pytest.mark.parametrize(
    ("metric", "start", "harmless", "ill"),
    [
        ("gap/mean", 0.01, 0.03, 0.05),
        ("gap/mean", 1e-7, 9e-6, 2e-5),
        ("response/truncated", 0.1, 0.25, 0.35),
        ("response/truncated", 0.45, 0.49, 0.52),
        ("staleness/mean", 1.0, 1.8, 2.2),
        ("staleness/mean", 0.0, 0.9, 1.1),
        ("reward/mean", 1.0, 0.92, 0.85),
    ],
)
def test_an_alert_opens_beyond_its_limit_only(metric, start, harmless, ill):
    for level, count in ((harmless, 0), (ill, 1)):
        rows = [{metric: start}] * 40 + [{metric: level}] * 40
        assert len(changes(rows)) == count, level


def test_a_held_out_set_is_named():
    values = (0.5, 0.7, 0.9, 0.91, 0.9, 0.92, 0.91, 0.9, 0.2, 0.21, 0.2)
    assert changes([{"eval/sums/accuracy": value} for value in values]) == [(9, True, "heldout_fell", "sums")]


def test_the_best_evaluation_of_a_long_run_is_not_forgotten():
    rows = [{"eval/accuracy": 0.9 if index < 10 else 0.6} for index in range(3 * USUAL)]
    assert changes(rows) == [(11, True, "heldout_fell", "")]


def test_an_alert_that_is_off_never_opens():
    assert changes(diseased("gap"), off=["gap"]) == []


def test_a_short_outlier_opens_nothing():
    outlier = {"gap/mean": 1.0, "reward/mean": 0.0, "policy/entropy": 0.0, "response/truncated": 1.0}
    rows = list(longer(HEALTHY, 200))
    for index in (50, 51, 120, 121, 170):
        rows[index] = rows[index] | outlier | {"staleness/mean": 9.0, "dropped/generate_failed": 30.0}
    assert changes(rows) == []


def test_values_that_are_not_finite_and_missing_ones_are_left_out():
    rows = [row if index % 7 else dict.fromkeys(row, float("nan")) for index, row in enumerate(longer(HEALTHY, 200))]
    assert changes(rows) == [] and changes([{}] * 50) == []


def test_noise_alone_opens_no_alert():
    for seed in range(4):
        chance = random.Random(seed)
        spread = chance.choice((0.005, 0.03, 0.1))
        slope = chance.choice((0.0, 5e-4))
        rows = []
        for step in range(1000):
            level = 0.3 + slope * step
            rows.append(
                {
                    "reward/mean": level + chance.gauss(0, spread),
                    "gap/mean": 0.01 * chance.lognormvariate(0, 0.4),
                    "policy/entropy": 0.5 * 0.998**step * chance.lognormvariate(0, 0.2),
                    "reward/std": 0.4,
                    "reward/groups_without_signal": min(1.0, 0.2 + step / 1000),
                    "response/truncated": abs(chance.gauss(0.1, 0.05)),
                    "staleness/mean": chance.uniform(0, 1),
                    "dropped/total": 0.0,
                    **({"eval/accuracy": level + chance.gauss(0, spread)} if step % 20 == 0 else {}),
                }
            )
        assert changes(rows) == [], seed


def test_a_model_that_has_learned_everything_is_no_collapse():
    learned = {"policy/entropy": 0.005, "reward/groups_without_signal": 0.97, "reward/std": 0.05, "reward/mean": 0.99}
    rows = [row | learned if index > 80 else row for index, row in enumerate(longer(HEALTHY, 300))]
    assert changes(rows) == []


def test_a_rare_signal_is_no_signal_unless_the_reward_has_risen():
    rare = {"reward/groups_without_signal": 0.95, "optim/steps_without_signal": 0.0, "reward/std": 0.1}
    stuck = [rare | {"reward/mean": 0.01 * (step % 3)} for step in range(60)]
    assert [change[:3] for change in changes(stuck)] == [(START, True, "no_signal")]
    learned = [rare | {"reward/mean": min(0.99, 0.05 * step)} for step in range(60)]
    assert changes(learned) == []
    for top, expected in ((0.1, RARE_AT), (0.2, RARE_AT), (0.3, [])):  # after 3 steps
        assert changes(silent(0.0, 0.0, 0.95, 4) + silent(top, 0.3, 0.95)) == expected, top


def silent(mean: float, std: float, groups: float = 1.0, steps: int = 60) -> list[Row]:
    """Steps in which `groups` of the groups have no signal."""
    without = {"reward/groups_without_signal": groups, "reward/mean": mean, "reward/std": std}
    return [without | {"optim/steps_without_signal": float(step) if groups == 1 else 0.0} for step in range(1, steps)]


SILENT_AT = [(SILENT_STEPS - 1, True, "no_signal", "")]
RARE_AT = [(START, True, "no_signal", "")]


@pytest.mark.parametrize(
    ("rows", "passing", "expected"),
    [
        (silent(1.0, 0.0), 1.0, []),
        (silent(0.95, 0.218), 1.0, []),
        (silent(0.95, 0.218, 0.95), 1.0, []),
        (silent(10.0, 0.0), 10.0, []),
        (silent(-0.1, 0.0), -0.1, []),
        (silent(0.0, 0.0), 1.0, SILENT_AT),
        (silent(0.2, 0.0), 1.0, SILENT_AT),
        (silent(0.5, 0.5), 0.5, SILENT_AT),
        (silent(0.8, 0.4, 0.95), 0.5, RARE_AT),
        (silent(1.0, 0.0), 10.0, SILENT_AT),
    ],
)
def test_a_task_that_is_solved_from_the_start_needs_no_signal(rows, passing, expected):
    assert changes(rows, passing=passing) == expected


def test_a_task_that_is_learned_within_the_first_steps_needs_no_signal():
    for top, std in ((1.0, 0.01), (0.6, 0.3)):  # all are correct, or rewards can be no higher
        learned = silent(0.1, 0.3, 0.3, 4) + silent(top, std, 0.95)
        assert changes(learned) == [], top
    assert changes(silent(0.1, 0.3, 0.3, 4) + silent(1.0, 0.0)) == []


def test_an_alert_about_the_signal_closes_when_the_task_is_solved():
    opened, closed = changes(silent(0.0, 0.0, steps=20) + silent(1.0, 0.0))
    assert opened[:2] == (SILENT_STEPS - 1, True) and not closed[1] and 20 < closed[0] < 30


def test_a_solved_task_with_some_hopeless_prompts_gives_no_alert():
    """8 groups, of which a few have no correct rollout and all others only correct ones."""
    for share in (0.01, 0.02):
        chance = random.Random(1)
        rows = []
        for step in range(1, 301):
            solved = sum(chance.random() > share for _ in range(8)) / 8
            rows.append(silent(solved, (solved * (1 - solved)) ** 0.5)[0] | {"optim/steps_without_signal": float(step)})
        assert changes(rows) == [], share
    assert changes(rows + silent(0.0, 0.0, steps=SILENT_STEPS)) == []
    assert changes(rows + silent(0.0, 0.0))[0] == (300 + SILENT_STEPS - 1, True, "no_signal", "")


def test_an_alert_that_opens_in_a_solved_step_names_its_cause():
    rows = silent(0.0, 0.0, 0.95, START + 1) + silent(1.0, 0.0)
    curves = Curves(GROUPS)
    ((opens, finding),) = [change for row in rows[: START + 1] for change in curves.look(row)]
    assert opens and "reward/groups_without_signal 0.95" in finding.text


def test_a_gradient_of_0_is_reported_although_rewards_are_high():
    assert changes([row | {"reward/groups_without_signal": 0.9} for row in silent(0.97, 0.1)]) == SILENT_AT


def test_the_noise_of_a_line_is_0():
    assert noise([1.0, 2.0, 3.0, 4.0]) == 0 and noise([0.0, 1.0, 0.0, 1.0]) > 0


def test_steps_without_a_signal_open_an_alert_at_their_limit():
    rows = [{"optim/steps_without_signal": float(count)} for count in (*range(1, 12), 0, 0, 1, 0, 0, 0, 0)]
    assert changes(rows) == [(SILENT_STEPS - 1, True, "no_signal", ""), (16, False, "no_signal", "")]
