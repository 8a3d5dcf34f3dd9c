"""A whole run whose trainer ranks write their weights straight to the engine's machine, over NIXL on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration
pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")


def test_two_trainer_ranks_write_to_an_engine_of_two_ranks(tiny_model: Path, task_of_sums: Path, tmp_path: Path):
    """Small buckets: slots of both rings are used again within a publication."""
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        publish={"transport": "nixl", "bucket_mib": 0.25},
        rollout={
            "prompts": str(task_of_sums / "train.jsonl"),
            "engines": [{"name": "actor", "max_total_tokens": 4096, "tensor": 2, "expert": 2}],
        },
        schedule={"steps": 2},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2]
    for row in rows.values():
        assert row["publish/engines_verified"] == 1 and row["publish/tensors_verified"] > 0
        assert row["gap/tokens"] > 0 and row["gap/mean"] <= 1e-5 and row["gap/tokens_unexplained"] == 0
        assert row["optim/grad_norm"] > 0
    run.assert_nothing_left()
