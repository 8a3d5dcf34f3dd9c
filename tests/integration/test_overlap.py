"""Gradients that are summed over data-parallel ranks beside the backward pass are those that are summed after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimx.runtime.ports import free_port
from tests.integration.block_models import make_block_model
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"world_size": 2},
    "PP2xVPP2xDP2": {"world_size": 4, "pipeline": 2, "virtual_pipeline": 2},
}


@pytest.mark.parametrize("name", ["DP2", pytest.param("PP2xVPP2xDP2", marks=pytest.mark.slow)])
def test_gradients_that_are_summed_beside_the_backward_pass_are_the_same_bits(tmp_path: Path, name: str) -> None:
    """A dense model: all its parameters have gradients. Weights, metrics and a checkpoint that goes on without it."""
    layout = LAYOUTS[name]
    model = make_block_model(tmp_path / "model", dense=True, layers=4)
    job = {"model": str(model), "layout": layout, "out": str(tmp_path), "init_method": f"tcp://127.0.0.1:{free_port()}"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.overlap_rank", tmp_path, layout["world_size"])
    for rank in range(layout["world_size"]):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        first, second, *_ = said["begun"]
        assert first[0] == "end", "the first step learns which gradients there are"
        assert len(first) > 2 and sorted(second) == sorted(first)
        assert second.index("end") > 1, "sums began before the backward pass had ended"
        assert said["equal"] and said["resumed_equal"]
        for each in ("metrics", "resumed"):
            after, beside = said[each]
            assert [*map(pytest.approx, after)] == beside
