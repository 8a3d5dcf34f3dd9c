"""Errors tell the same in the process that reads them as in the one that raised them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from slimx.errors import DeadlineError, counted, duration, raised


def test_a_deadline_error_survives_pickling():
    error = DeadlineError("the stop of engine e0", 30.0, "process 7")
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error) and all(part in str(error) for part in (error.awaited, error.holder, "30 s"))
    assert (other.awaited, other.seconds, other.holder) == (error.awaited, error.seconds, error.holder)


@pytest.mark.parametrize(("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1024, "1,024 ranks")])
def test_only_a_count_of_one_has_a_noun_in_the_singular(count, text):
    assert counted(count, "rank") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3.0, "-3 s"),
        (0.0, "0 s"),
        (0.0123456, "12.3 ms"),
        (0.9814, "981 ms"),
        (0.9999, "1 s"),
        (12.34, "12.3 s"),
        (59.99, "1 min"),
        (185.0, "3.08 min"),
        (3599.9, "1 h"),
        (7740.0, "2.15 h"),
        (40 * 86400.0, "40 d"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_an_error_of_a_user_is_placed_where_his_code_called_the_library(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text("import json\n\n\ndef reward(text):\n    return json.loads(text)\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(ValueError) as caught:
        scope["reward"]("{")
    message = raised(caught.value)
    assert message.startswith("JSONDecodeError: ") and message.endswith(f"({file}, line 5)")


def test_an_error_without_a_users_code_has_no_place():
    assert raised(KeyError("nope")) == "KeyError: 'nope'"
