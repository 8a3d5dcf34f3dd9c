"""The mathematics reward pays what is equal and nothing else: a table of answers, and answers made to hang it."""

from __future__ import annotations

import csv
import time
from collections import Counter
from pathlib import Path

import pytest

from slimx.errors import SlimxError
from slimx.extras.rewards import math
from slimx.extras.rewards.shared.verification import in_time
from tests.extras.rewards.reward_stand import judged

with Path(__file__).with_name("math_answers.tsv").open(newline="") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
LIMITS = "known limits"
"""The group of answers that are judged wrongly today; their verdicts are the right ones too."""


def differing(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if judged(math.reward, row["response"], row["gold"]) != float(row["verdict"])]


@pytest.mark.parametrize("group", sorted({row["group"] for row in ROWS} - {LIMITS}))
def test_every_answer_of_a_group_is_judged_as_mathematics_judges_it(group):
    assert differing([row for row in ROWS if row["group"] == group]) == []


def test_the_table_has_right_and_wrong_answers_of_each_kind():
    verdicts = Counter((row["group"], row["verdict"]) for row in ROWS if row["group"] != LIMITS)
    assert verdicts.total() >= 350
    assert sum(count for (_, verdict), count in verdicts.items() if verdict == "0") >= 120


def test_known_limits_are_still_limits():
    """An answer that is judged rightly from now on belongs into its group of the table."""
    rows = [row for row in ROWS if row["group"] == LIMITS]
    assert len(rows) == 7 and differing(rows) == rows


@pytest.mark.parametrize("answer", ["as you like", "no solution", "Paris", "yes", "B", "", "odd or even"])
def test_words_are_refused_as_answers(answer):
    with pytest.raises(SlimxError) as refused:
        judged(math.reward, "18", answer)
    assert (refused.value.code, refused.value.about) == ("reward.answer", "p7")


SECOND = pytest.mark.slow("computes until the second is over, as the two that are left")


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{10^{10^{10}}}",
        pytest.param(r"\boxed{i + 10^{10^{10}}}", marks=SECOND),
        pytest.param(r"\boxed{((10!)!)!}", marks=SECOND),
        r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k^3+k+1}}",
        r"\boxed{" + "(" * 3000 + "5" + ")" * 3000 + "}",
        r"\boxed{" * 20_000,
        pytest.param("9" * 1_000_000, marks=SECOND),
        pytest.param("1e999999999", marks=SECOND),
        r"0.\overline{" + "7" * 20_000 + "}",
    ],
    ids=["tower", "complex tower", "factorials", "sum", "nested", "unclosed", "digits", "exponent", "period"],
)
def test_an_answer_that_would_take_for_ever_earns_nothing_in_bounded_time(response, monkeypatch):
    monkeypatch.setattr(math, "SECONDS", 1)
    began = time.process_time()
    assert judged(math.reward, response, "5") == 0.0
    assert time.process_time() - began < 15, "four times a second each for reading, parsing and comparing"


def burn(seconds: float) -> None:
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_that_python_drops_comes_again():
    class Finalized:
        def __del__(self) -> None:
            burn(0.3)  # the first alarm strikes here

    def compute() -> str:
        Finalized()
        burn(60)
        return "too late"

    assert in_time(compute, 0.1) is None


def test_only_time_of_the_processor_counts():
    def compute() -> str:
        time.sleep(0.3)
        return "as on a busy machine"

    assert in_time(compute, 0.1) == "as on a busy machine"
