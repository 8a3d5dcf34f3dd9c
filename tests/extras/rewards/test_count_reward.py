"""Counting is paid by the last number of an answer, in digits or words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimx.extras.rewards.images import count
from slimx.extras.rewards.images.count import last_integer
from tests.extras.rewards.reward_stand import judged
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5),
        ("There are 5.", 5),
        ("**5** apples", 5),
        ("5.0", 5),
        ("3 red and 2 green ones: 5", 5),
        ("3, 4, 5", 5),
        ("2-3", 3),
        ("5.Then I stopped", 5),
        ("-3", -3),
        ("−3", -3),
        ("1,234", 1234),
        ("$1{,}234$", 1234),
        ("1,234,567 stars", 1234567),
        ("007", 7),
        ("Five", 5),
        ("twenty", 20),
        ("There is one.", 1),
        ("zero", 0),
        ("one of them, so three", 3),
        ("3 cats, one of them black", 3),
        ("5.5", None),
        ("1,2,3", None),
        ("12,34", None),
        ("1.2.3", None),
        ("3D", None),
        ("the 2nd", None),
        ("B12", None),
        ("5²", None),
        ("٥", None),
        ("５", None),
        ("twenty-one", None),
        ("one hundred and five", None),
        ("twenty-first", None),
        ("someone", None),
        ("no-one", None),
        ("", None),
        ("many", None),
        ("9" * 16, None),
        ("9" * 100_000, None),
        ("1," * 50_000, None),
    ],
)
def test_the_last_number_is_read(text, number):
    assert last_integer(text) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"3 + 4 = \boxed{7}, seen 2 times", 1.0),
        ("<answer>7</answer> of 10", 1.0),
        ("<answer>There are seven.</answer>", 1.0),
        (r"\boxed{\text{seven}}", 1.0),
        ("<think>7</think>8", 0.0),
        ("<think>8</think>7", 1.0),
        ("<think>7", 0.0),
        ("7 <answer>", 0.0),
        ("<answer>7", 0.0),
        (r"7 \boxed{", 0.0),
        (r"\boxed{7} or \boxed{8}", 0.0),
        ("", 0.0),
    ],
)
def test_the_number_is_searched_where_the_answer_stands(text, value):
    assert judged(count.reward, text, "7") == value


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [("4", "4", 1.0), ("3", "4", 0.75), ("6", "4", 0.5), ("8", "4", 0.0), ("99", "4", 0.0), ("-4", "4", 0.0)]
    + [("0", "0", 1.0), ("1", "0", 0.0), ("4.5", "4", 0.0), ("1000", "1,000", 1.0), ("2", "Two", 1.0)],
)
def test_partial_credit_falls_with_the_relative_error(text, answer, value):
    assert judged(count.reward, text, answer, partial=True) == value
    assert judged(count.reward, text, answer) == float(value == 1.0)


@settings(deadline=None)
@given(st.integers(0, 10**15 - 1), st.sampled_from(["{}", "{:,}", "{}.", "{}.00", " {:,} apples", r"\boxed{{{}}}"]))
def test_each_notation_of_an_integer_has_its_value(number, notation):
    assert judged(count.reward, notation.format(number), str(number)) == 1.0


@settings(deadline=None)
@given(st.text(st.sampled_from("0123456789,.- eno٣²{}")), st.booleans())
def test_no_response_raises_or_leaves_the_range(text, partial):
    assert 0 <= judged(count.reward, text, "11", partial=partial) <= 1


@pytest.mark.parametrize("answer", ["", "many", "4.5", "-4", "3 or 4", "B2", "٤", "9" * 5000])
def test_an_answer_that_is_no_count_is_refused(answer):
    with refused("reward.answer", about="p7"):
        judged(count.reward, "4", answer)
