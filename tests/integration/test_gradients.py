"""Choices about gradients: products that add to them by themselves (apex's extension), and sums in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import apex_stand
from tests.integration.block_models import make_block_model
from tests.integration.conftest import free_port
from tests.integration.rank_processes import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_fusion_changes_no_gradient_and_bf16_rounds_them(tmp_path: Path) -> None:
    layout = {"world_size": 2, "expert": 2}
    model = make_block_model(tmp_path / "model")
    job = {"model": str(model), "layout": layout, "kinds": [], "out": str(tmp_path)}
    job["init_method"] = f"tcp://127.0.0.1:{free_port()}"
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.gradient_rank", tmp_path, 2, machine=apex_stand.__name__)
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [what for what, true in said.items() if true is False] == []
        assert sum(true is True for true in said.values()) == 8, said
        assert 1e-4 < said["apart"] < 2e-2
        weights, gradients = said["bytes"]
        assert gradients == weights
