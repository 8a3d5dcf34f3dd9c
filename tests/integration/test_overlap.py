"""Data-parallel ranks exchange the same bits beside passes as between them, and bf16 rounds gradients once."""

from __future__ import annotations

import json
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


@pytest.fixture(
    scope="module", params=["DP2", pytest.param("PP2xVPP2xDP2", marks=pytest.mark.slow("a layout of four ranks"))]
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Answers of each rank about a dense model, all of whose parameters have gradients."""
    layout, out = LAYOUTS[request.param], tmp_path_factory.mktemp(request.param)
    model = make_block_model(out / "model", dense=True, layers=4)
    job = {"model": str(model), "layout": layout, "out": str(out), "init_method": f"tcp://127.0.0.1:{free_port()}"}
    (out / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.overlap_rank", out, layout["world_size"])
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(layout["world_size"])]


def test_gradients_reduced_during_the_backward_pass_are_equal(ranks: list[dict[str, Any]]) -> None:
    """Weights, metrics and a checkpoint that goes on without it."""
    for said in ranks:
        first, second, *_ = said["begun"]
        assert first[0] == "end", "the first step learns which gradients there are"
        assert len(first) > 2 and sorted(second) == sorted(first)
        assert second.index("end") > 1, "sums began before the backward pass had ended"
        assert said["equal"] and said["resumed_equal"]
        for each in ("metrics", "resumed"):
            after, beside = said[each]
            assert [*map(pytest.approx, after)] == beside


def test_weights_gathered_during_the_forward_pass_are_equal(ranks: list[dict[str, Any]]) -> None:
    """Between the updates of a step; when it ends they are whole: on every rank, in a checkpoint, for log-probs."""
    for said in ranks:
        for at_once, beside in (said["gathered"][:2], said["gathered"][2:]):
            assert pytest.approx(at_once) == beside
        assert said["gathered_equal_0"] and said["gathered_equal_1"] and said["scored_equal"]
        for events in said["order"]:
            before, between, after = " ".join(events).split("step")
            assert "gather" not in before, "the step before left the weights whole"
            assert between.index("gather") < between.index("layer")
            assert "layer gather" in between or said["stage"], "the later layers' weights came beside the first layers"
            assert "gather" in after


def test_gradients_in_bf16_are_rounded_once_where_two_ranks_add_them(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        if "halved" not in said:
            pytest.skip("the sums of several micro-batches are rounded several times")
        assert said["halved"] == ["torch.bfloat16"]
        assert said["rounded_once"] and not said["rounding"]
        assert said["sharded_equal"] and said["copies_left"] == 0
