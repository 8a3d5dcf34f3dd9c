"""Errors tell the same in the process that reads them as in the one that raised them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from slimx.errors import DeadlineError, raised


def test_a_deadline_error_survives_pickling():
    error = DeadlineError("the stop of engine e0", 30.0, "process 7")
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error) and all(part in str(error) for part in (error.awaited, error.holder, "30 s"))
    assert (other.awaited, other.seconds, other.holder) == (error.awaited, error.seconds, error.holder)


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
