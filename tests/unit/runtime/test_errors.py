"""Errors tell the same in the process that reads them as in the one that raised them."""

from __future__ import annotations

import pickle

from slimx.errors import DeadlineError


def test_a_missed_deadline_survives_the_way_between_processes():
    error = DeadlineError("the stop of engine e0", 30.0, "process 7")
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error) and all(each in str(error) for each in (error.awaited, error.holder, "30 s"))
    assert (other.awaited, other.seconds, other.holder) == (error.awaited, error.seconds, error.holder)
