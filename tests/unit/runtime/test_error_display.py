"""A notebook shows an error for users as its sentence alone."""

from __future__ import annotations

import signal

import pytest

from slimx.errors import Interrupted, Preempted, SlimxError


@pytest.mark.parametrize("error", [SlimxError("no; do"), Preempted(2, 5), Interrupted(signal.SIGTERM)])
def test_a_notebook_shows_the_sentence_of_an_error(error):
    (line,) = error._render_traceback_()
    assert line.startswith("slimx: ") and str(error) in line and "Traceback" not in line
