"""Reports of tests whose ranks fail or hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimx.runtime.ports import free_port
from tests.integration.rank_processes import run_ranks
from tests.refusals import numbers
from tests.warm.interpreter import MARK, programs

pytestmark = pytest.mark.integration


def begin(out: Path, fails: int | None) -> Path:
    out.mkdir()
    (out / "job.json").write_text(json.dumps({"init_method": f"tcp://127.0.0.1:{free_port()}", "fails": fails}))
    return out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_with_its_words(tmp_path, rank):
    out = begin(tmp_path / "out", rank)
    with pytest.raises(AssertionError) as caught:
        run_ranks("tests.integration.hanging_rank", out, 2)
    head, words = str(caught.value).split("\n", 1)
    assert numbers(head)[-2:] == [rank, 1] and f"rank {rank} fails" in words, "the rank, its status, and its own words"


def test_ranks_that_hang_are_ended_and_the_function_of_each_is_named(tmp_path, monkeypatch):
    """The deadline grows, up to 60 s, until both ranks are there: a loaded machine takes long."""
    monkeypatch.setenv(MARK, str(tmp_path))
    for seconds in (2, 8, 60):
        out = begin(tmp_path / str(seconds), None)
        with pytest.raises(AssertionError) as late:
            run_ranks("tests.integration.hanging_rank", out, 2, seconds)
        assert f"{seconds} s\n" in str(late.value)
        if all("is in" in (out / f"{rank}.log").read_text() for rank in range(2)):
            break
    first, second = str(late.value).split("--- process ")[1:]
    assert "in waits_in_a_collective" in first and "in barrier" in first
    assert "in never_comes" in second
    assert not programs(str(tmp_path))
