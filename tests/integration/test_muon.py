"""Muon on gloo ranks: against one in plain torch, over layouts, and its state on disk, on the host and in the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.parameter_runs import Holdings
from slimx.extras.planner.memory.state import Buffers
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.runtime.ports import free_port
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "TP2xEP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "TP2xETP2xEP2": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 2},
    "CP2xPP2": {"world_size": 4, "context": 2, "pipeline": 2},
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow("layouts of four ranks")] if layout["world_size"] > 2 else [])
    for name, layout in LAYOUTS.items()
]


class Laboratory:
    """Runs each layout once, when it is first asked for."""

    def __init__(self, directory: Path, model: Path):
        self.directory, self.model = directory, model
        self._done: dict[str, list[dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        if name not in self._done:
            out = self.directory / name
            out.mkdir()
            address = f"tcp://127.0.0.1:{free_port()}"
            job = {
                "model": str(self.model),
                "layout": LAYOUTS[name],
                "kinds": [],
                "out": str(out),
                "init_method": address,
            }
            (out / "job.json").write_text(json.dumps(job))
            run_ranks("tests.integration.muon_rank", out, LAYOUTS[name]["world_size"])
            self._done[name] = [
                json.loads((out / f"{rank}.json").read_text()) for rank in range(LAYOUTS[name]["world_size"])
            ]
        return self._done[name]


@pytest.fixture(scope="module")
def laboratory(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("muon"), tiny_model)


def test_matrices_take_muons_steps_and_everything_else_adamws(laboratory):
    (said,) = laboratory["single"]
    assert said["matrices"] > 0 and said["moved"] > 1e-3
    assert said["distance"] <= 1e-5


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_layout_does_not_change_the_steps(laboratory, name):
    assert laboratory[name] and laboratory["single"]
    layout, single = (load_file(laboratory.directory / each / "weights.safetensors") for each in (name, "single"))
    assert layout.keys() == single.keys()
    assert max(float((layout[key] - single[key]).abs().max()) for key in single) <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_state_comes_back_from_disk_and_from_the_host_bit_for_bit(laboratory, name):
    for said in laboratory[name]:
        assert said["restored"] and said["moments"] and said["away"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_counts_one_moment_of_a_matrix_and_two_of_all_else(laboratory, name, tiny_model):
    trainer = Trainer(**LAYOUTS[name], optimizer={"kind": "muon"}, distributed_optimizer=False)
    sizes = sizes_of(trainer)
    table = read_model(str(tiny_model)).table
    for rank, said in enumerate(laboratory[name]):
        for dtype, held in (("float32", said["state_bytes"]), ("bfloat16", said["bf16_state_bytes"])):
            runs = Holdings(table, dtype).runs(sizes, rank)
            assert Buffers(runs, trainer, sizes).state(rank).optimizer == held, dtype
