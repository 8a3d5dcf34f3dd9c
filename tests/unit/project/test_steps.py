"""Steps of a check: one that fails ends none but those that need it, and the table is there after each."""

from __future__ import annotations

from pathlib import Path

from tools.steps import Failed, LeftOut, Steps


def test_a_failed_step_leaves_out_those_that_need_it_and_no_other(tmp_path: Path) -> None:
    def fails() -> str:
        raise Failed("32 | 48")

    def breaks() -> str:
        raise ZeroDivisionError("by none")

    def is_absent() -> str:
        raise LeftOut("no GPU")

    steps = Steps("a title", tmp_path / "steps.md")
    steps.take("one", lambda: "3 GB/s", expected="4 GB/s")
    steps.take("two", fails, needs=["one"])
    steps.take("three", lambda: "ok", needs=["one", "two"])
    steps.take("four", breaks)
    steps.take("five", is_absent)
    steps.take("six", lambda: None, needs=["five"])
    assert [outcome.state for outcome in steps.outcomes] == [
        "ok",
        "FAILED",
        "left out",
        "FAILED",
        "left out",
        "left out",
    ]
    assert steps.failed == ["two", "four"]
    lines = (tmp_path / "steps.md").read_text().splitlines()
    assert lines[0] == "a title" and lines[4].startswith("| one | ok | 4 GB/s | 3 GB/s | ")
    assert lines[5].count("|") == 7  # six of the table, one of the cell
