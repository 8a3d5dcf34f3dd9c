"""Exact mode with weights in blocks of fp8: a real server that holds codes, and trainers that round as it was told."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slimx.engines.server.engine import Engine
from slimx.layout.ranks import EngineSizes
from tests.integration import exact_server
from tests.integration.block_models import in_fp8, make_block_deepseek, make_block_model, published
from tests.integration.conftest import Weights
from tests.integration.exact_runs import DENSE, ONE, TWO, assert_none, gaps
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("full grid of models and layouts, two whole runs")]


async def in_blocks(engine: Engine, model: Path) -> list[Weights]:
    return published(model, engine.spec.sizes)


MAKE = {
    "qwen3_moe": make_block_model,
    "qwen3": partial(make_block_model, dense=True),
    "deepseek_v3": make_block_deepseek,
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"tensor": 2, "expert": 2}),
        ("qwen3_moe", {"tensor": 2}),
        ("qwen3", {"tensor": 2}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"tensor": 2, "expert": 2}),
    ],
)
def test_fp8_server_and_trainers_of_every_layout_agree_bit_for_bit(
    tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    first = MAKE[name](tmp_path / "first")
    second = exact_server.changed(first, tmp_path / "second")
    fp8 = in_fp8(first, tmp_path / "fp8")
    engine = exact_server.server(fp8, "bfloat16", 2, EngineSizes(**sizes), tmp_path / "server.log")
    sampled = exact_server.run(engine, first, second, in_blocks)
    cases = [{"leaves": 2, **case} for case in [ONE, *(DENSE if name == "qwen3" else TWO)]]
    groups: list[dict[str, Any]] = [
        {"model": model, "dtype": "bfloat16", "completions": done, "cases": cases, "quantize": "ieee"}
        for model, done in sampled.items()
    ]
    others = [
        groups[0] | {"completions": groups[1]["completions"], "cases": cases[:1]},
        groups[0] | {"quantize": None, "cases": cases[:1]},
    ]
    *found, [stale], [unrounded] = gaps(tmp_path / "ranks", [*groups, *others])
    assert_none(groups, found)
    assert stale["gap/max"] > 0, "weights of another version must show"
    assert unrounded["gap/max"] > 0, "a trainer that does not round its weights must show"


def run_config(directory: Path, prompts: Path, rule: str) -> Path:
    """A run of the quickstart's task."""
    model = make_block_model(directory / "model")
    return write_config(
        directory,
        model,
        prompts,
        numerics={"mode": "exact", "dtype": "bfloat16"},
        publish={"quantize": rule},
        rollout={"engines": [{"model": str(in_fp8(model, directory / "fp8", rule)), "max_total_tokens": 8192}]},
        algorithm={"reference": True, "kl_coef": 0.01, "old_logprobs": "recompute"},
        schedule={"steps": 3},
    )


@pytest.mark.parametrize("rule", ["ieee", "ue8m0"])
def test_a_run_has_no_gap_over_publications(rule: str, task_of_sums: Path, tmp_path: Path) -> None:
    run = TrainProcess(run_config(tmp_path, task_of_sums / "train.jsonl", rule))
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/max"] == 0.0 and row["mismatch/max"] == 0.0
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
