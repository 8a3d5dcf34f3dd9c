"""Mistakes of new users are answered as tests/golden/mistakes.txt shows, before anything is started."""

from __future__ import annotations

import re

import pytest

from tools.docs import mistakes

LEAST = 250


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow("every mistake"))])
def test_every_mistake_is_answered_as_the_page_shows(every: int):
    shown = mistakes.PAGE.read_text().removeprefix("# ").rstrip("\n").split("\n\n# ")
    transcript = [mistakes.transcript(one).removeprefix("# ").rstrip("\n") for one in mistakes.MISTAKES[::every]]
    differing = [(old, new) for old, new in zip(shown[::every], transcript, strict=True) if old != new]
    assert differing == [], "run python -m tools.docs.make_messages, and read the difference"


def test_a_refusal_is_one_sentence():
    names = [mistake.name for mistake in mistakes.MISTAKES]
    assert len(names) == len({*names}) >= LEAST
    page = mistakes.PAGE.read_text()
    assert re.findall("^# (.*)$", page, re.MULTILINE) == names
    for command, output, status in re.findall(
        r"^\$ slimx (\w+)[^\n]*\n(.*?)^\[(\d)\]$", page, re.MULTILINE | re.DOTALL
    ):
        if command != "doctor":  # what it tells of hooks is a list
            assert status == "2"
            first, *others = re.sub("^checking .*\n", "", output).splitlines()
            assert first.startswith("slimx: ") and all(line.startswith("  ") for line in others), output
