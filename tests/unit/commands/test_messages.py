"""Each command answers its most common mistakes as tests/golden/ shows, and a refusal is one sentence."""

from __future__ import annotations

import re

import pytest

from tools.docs import mistakes
from tools.docs.make_messages import CASES, GOLDEN, page


@pytest.mark.parametrize("command", CASES)
def test_a_command_says_what_its_golden_file_shows(command):
    shown = (GOLDEN / f"{command}.txt").read_text()
    assert page(command) == shown, "run python -m tools.docs.make_messages, and read the difference"
    for case in shown.strip().split("\n\n"):
        typed, *output, status = case.split("\n")
        assert typed.startswith(f"$ slimx {command} ") and re.fullmatch(r"\[[012]\]", status)
        if status == "[2]":
            output = [line for line in output if not line.startswith("checking ")]
            assert output[0].startswith("slimx: ") and all(line.startswith("  ") for line in output[1:])


def test_every_golden_file_belongs_to_a_command_or_is_that_of_the_mistakes():
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {*CASES, mistakes.PAGE.stem}
