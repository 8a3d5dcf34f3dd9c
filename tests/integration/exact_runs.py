"""Runs in exact mode that two files of tests start, and the gaps that they have left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimx.runtime.ports import free_port
from tests.integration import exact_rank
from tests.integration.rank_processes import run_ranks

ONE: dict[str, Any] = {"trainer": {}}
TWO: list[dict[str, Any]] = [
    {"trainer": {"world_size": 2, "tensor": 2}},  # experts cut by tensor parallelism too
    {"trainer": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1}},
    {"trainer": {"world_size": 2, "expert": 2}},
    {"trainer": {"world_size": 2, "pipeline": 2, "max_tokens_per_microbatch": 4096}},
    {"trainer": {"world_size": 2, "context": 2}},
    {"trainer": {"world_size": 2, "max_tokens_per_microbatch": 60}},  # data parallel
]
"""Layouts of two ranks; the packing differs as well."""
DENSE = [case for case in TWO if "expert" not in case["trainer"]]


def gaps(out: Path, groups: list[dict[str, Any]], world: int = 2) -> list[list[dict[str, float]]]:
    """Gap metrics of every group's cases (exact_rank)."""
    count = sum(len(group["cases"]) for group in groups)
    meetings = [f"tcp://127.0.0.1:{free_port()}" for _ in range(count)]
    ranks = run_ranks(exact_rank.run, out, world, {"groups": groups, "init_methods": meetings})
    return [
        [next((rank[g][c] for rank in ranks if rank[g][c]), {}) for c in range(len(group["cases"]))]
        for g, group in enumerate(groups)
    ]


def assert_none(groups: list[dict[str, Any]], found: list[list[dict[str, float]]]) -> None:
    """No gap in any case of any group."""
    for group, metrics in zip(groups, found, strict=True):
        for case, metric in zip(group["cases"], metrics, strict=True):
            assert metric["gap/tokens"] == sum(len(one["tokens"]) for one in group["completions"])
            assert metric["gap/max"] == 0.0, (group["model"], case)
