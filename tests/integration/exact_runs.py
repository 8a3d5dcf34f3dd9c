"""Runs in exact mode that two files of tests start, and the gaps that they have left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimx.runtime.ports import free_port
from tests.integration import exact_rank
from tests.integration.block_models import make_block_model
from tests.integration.deepseek_checkpoint import make_deepseek
from tests.integration.engine_families import make_model
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
THREE_LAYERS = {"layers_per_stage": (1, 2)}
"""Layers of the two stages, for models with three layers; the quickstart's has two."""
DENSE = [case for case in TWO if "expert" not in case["trainer"]]


def gaps(
    out: Path, groups: list[dict[str, Any]], world: int = 2, function: Callable[..., Any] = exact_rank.run
) -> list[list[dict[str, float]]]:
    """Gap metrics of every group's cases, as `function` (`exact_rank.run`, or one of its form) measures them."""
    count = sum(len(group["cases"]) for group in groups)
    meetings = [f"tcp://127.0.0.1:{free_port()}" for _ in range(count)]
    ranks = run_ranks(function, out, world, {"groups": groups, "init_methods": meetings})
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


def make_models(out: Path, tiny_model: Path) -> dict[str, Path]:
    """Directories of models in which exact mode is compared, by family."""
    for name in ("qwen3", "qwen2", "llama", "glm4_moe"):
        make_model(name, out / name)
    make_deepseek(out / "deepseek")
    make_deepseek(out / "direct", q_lora_rank=None)  # no latents of queries, as in Moonlight
    make_block_model(out / "blocks")
    return {"moe": tiny_model} | {path.name: path for path in out.iterdir()}


def cases_of(name: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One rank first; all with two leaves unless they say otherwise."""
    out = [{"leaves": 2, **case} for case in [ONE, *cases]]
    return (
        out
        if name in ("moe", "blocks")
        else [
            {**case, "trainer": case["trainer"] | (THREE_LAYERS if "pipeline" in case["trainer"] else {})}
            for case in out
        ]
    )
