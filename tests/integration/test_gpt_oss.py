"""A gpt-oss in the trainer's pipeline stages and under context parallelism, and its export: what test_families, whose
layouts split experts or have no export, does not try."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimx.layout.ranks import Sizes
from slimx.runtime.ports import free_port
from tests.integration.family_cases import CASES
from tests.integration.family_laboratory import difference
from tests.integration.family_oracle import Oracle
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration

LAYOUTS = {
    "TP2xPP2xEP2": Sizes(tensor=2, pipeline=2, expert=2),
    "CP2": Sizes(context=2),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return CASES["gpt-oss"].make(tmp_path_factory.mktemp("model"), 0)


class Laboratory:
    """Runs each layout once, when it is first asked for."""

    def __init__(self, directory: Path, oracle: Oracle):
        self.directory, self.oracle = directory, oracle

    def __call__(self, layout: str) -> Path:
        out, sizes = self.directory / layout, LAYOUTS[layout]
        if not out.exists():
            out.mkdir()
            keys = {name: getattr(sizes, name) for name in ("tensor", "pipeline", "expert", "expert_tensor", "context")}
            job = {
                "path": str(self.oracle.path),
                "layout": {"world_size": sizes.world, **keys},
                "out": str(out),
                "init_method": f"tcp://127.0.0.1:{free_port()}",
            }
            (out / "job.json").write_text(json.dumps(job))
            run_ranks("tests.integration.gpt_oss_rank", out, sizes.world)
        return out


@pytest.fixture(scope="module")
def laboratory(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    yield Laboratory(tmp_path_factory.mktemp("layouts"), oracle)


every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
def test_a_checkpoint_is_exported_bit_for_bit(laboratory, oracle, layout):
    back = load_file(laboratory(layout) / "weights.safetensors")
    assert back.keys() == oracle.weights.keys()
    assert [name for name, tensor in oracle.weights.items() if not torch.equal(back[name], tensor)] == []


@every_layout
def test_gradients_are_those_of_transformers_for_sinks_and_biases_too(laboratory, oracle, layout):
    wanted = oracle.answers[1]
    assert wanted.keys() == oracle.weights.keys() and all(tensor.any() for tensor in wanted.values())
    worst, name = difference(load_file(laboratory(layout) / "gradients.safetensors"), wanted)
    assert worst <= CASES["gpt-oss"].rounding, name


@every_layout
def test_a_trainers_checkpoint_gives_every_weight_back_bit_for_bit(laboratory, oracle, layout):
    saved, restored = (load_file(laboratory(layout) / f"{kind}.safetensors") for kind in ("after", "restored"))
    assert [name for name, tensor in saved.items() if not torch.equal(restored[name], tensor)] == []
    assert [name for name, tensor in saved.items() if torch.equal(oracle.weights[name], tensor)] == []
