"""Low-rank adapters beside tensor-parallel layers: forward, gradients and merged weights are those of plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import free_port
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration


def ranks(out: Path, world: int) -> list[dict]:
    out.mkdir()
    job = {
        "layout": {"world_size": world, "tensor": world},
        "out": str(out),
        "init_method": f"tcp://127.0.0.1:{free_port()}",
    }
    (out / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.lora_rank", out, world)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


def test_adapters_of_one_and_of_two_ranks_are_those_of_plain_torch(tmp_path):
    single, first, second = (*ranks(tmp_path / "single", 1), *ranks(tmp_path / "TP2", 2))
    for said in (single, first, second):
        assert max(said["errors"].values()) <= 1e-5, said["errors"]
        assert said["frozen"] == [True, True]
        assert said["starts"] == single["starts"]
