"""Exact mode with weights in blocks of fp8: a real server that holds codes, and trainers that round as it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimx.reshard.precision import Rule
from tests.integration.block_models import in_fp8, make_block_model
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def run_config(directory: Path, prompts: Path, rule: Rule) -> Path:
    """A run of the quickstart's task."""
    model = make_block_model(directory / "model")
    return write_config(
        directory,
        model,
        prompts,
        numerics={"mode": "exact", "dtype": "bfloat16"},
        publish={"quantise": rule},
        rollout={"engines": [{"model": str(in_fp8(model, directory / "fp8", rule)), "max_total_tokens": 8192}]},
        algorithm={"reference": True, "kl_coef": 0.01, "old_logprobs": "recompute"},
        schedule={"steps": 3, "step_deadline": 120},
    )


@pytest.mark.parametrize("rule", ["ieee", "ue8m0"])
def test_a_run_has_no_gap_over_publications(rule: Rule, task_of_sums: Path, tmp_path: Path) -> None:
    run = TrainProcess(run_config(tmp_path, task_of_sums / "train.jsonl", rule))
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/max"] == 0.0 and row["mismatch/max"] == 0.0
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
