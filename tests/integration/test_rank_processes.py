"""Reports of tests whose ranks fail or hang."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest

from tests.integration.rank_processes import run_ranks
from tests.refusals import numbers
from tests.warm.interpreter import MARK, programs

pytestmark = pytest.mark.integration


def waits_in_a_collective() -> None:
    import torch.distributed as dist

    dist.barrier()


def never_comes() -> None:
    signal.pause()


def meet(job: dict[str, Any], rank: int) -> None:
    """Runs one of two gloo ranks: one waits in a collective for the other, which never comes."""
    import torch.distributed as dist

    where = job["init_method"]
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    print(f"rank {rank} is in", flush=True)
    if job["fails"] == rank:
        raise RuntimeError(f"rank {rank} fails on purpose")
    # Who fails not waits too: a rank that left would take the store from one that has not quite joined.
    never_comes() if rank or job["fails"] is not None else waits_in_a_collective()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_with_its_words(tmp_path, rank):
    with pytest.raises(AssertionError) as caught:
        run_ranks(meet, tmp_path, 2, {"fails": rank})
    head, words = str(caught.value).split("\n", 1)
    assert numbers(head)[-2:] == [rank, 1] and f"rank {rank} fails" in words, "the rank, its status, and its own words"


def test_ranks_that_hang_are_ended_and_the_function_of_each_is_named(tmp_path, monkeypatch):
    """The deadline grows, up to 60 s, until both ranks are there: a loaded machine takes long."""
    monkeypatch.setenv(MARK, str(tmp_path))
    for seconds in (2, 8, 60):
        out = tmp_path / str(seconds)
        with pytest.raises(AssertionError) as late:
            run_ranks(meet, out, 2, {"fails": None}, seconds=seconds)
        assert f"{seconds} s\n" in str(late.value)
        if all("is in" in (out / f"{rank}.log").read_text() for rank in range(2)):
            break
    first, second = str(late.value).split("--- process ")[1:]
    assert "in waits_in_a_collective" in first and "in barrier" in first
    assert "in never_comes" in second
    assert not programs(str(tmp_path))
