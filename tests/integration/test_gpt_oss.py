"""A gpt-oss in the trainer's pipeline stages and under context parallelism, and its export: what test_families, whose
layouts split experts or have no export, does not try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slimx.layout.ranks import Sizes
from tests.integration.family_cases import CASES
from tests.integration.family_laboratory import difference
from tests.integration.family_oracle import Oracle
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_rank import Rank

pytestmark = pytest.mark.integration

LAYOUTS = {
    "TP2xPP2xEP2": Sizes(tensor=2, pipeline=2, expert=2),
    "CP2": Sizes(context=2),
}


class GptOssRank(Rank):
    optimizer = {"lr": 1e-3, "clip_grad": 0.0}


def train(job: dict[str, Any], number: int) -> dict[str, Any]:
    """Writes the weights of the checkpoint, gradients of a step, the weights after it, and those of a checkpoint of the
    trainer, under Hugging Face names, by the code that exports."""
    import torch

    rank = GptOssRank(job, number)
    trainer = rank.trainer(distributed_optimizer=False)  # else each rank has a part of the gradients
    rank.write_tensors("weights", trainer.weights.parameters)
    rank.steps(trainer, (0,))
    rank.write_tensors("gradients", rank.gradients(trainer))
    rank.write_tensors("after", trainer.weights.parameters)
    rank.save(trainer, rank.out / "checkpoint", step=0)
    with torch.no_grad():
        for parameter in trainer.weights.parameters.values():
            parameter.add_(1.0)
    trainer.restore(str(rank.out / "checkpoint"), same_layout=True)
    rank.write_tensors("restored", trainer.weights.parameters)
    return rank.finish()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return CASES["gpt-oss"].make(tmp_path_factory.mktemp("model"), 0)


class Laboratory:
    """Runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, oracle: Oracle):
        self.directory, self.oracle = directory, oracle

    def __call__(self, layout: str) -> Path:
        out, sizes = self.directory / layout, LAYOUTS[layout]
        if not out.exists():
            keys = {name: getattr(sizes, name) for name in ("tensor", "pipeline", "expert", "expert_tensor", "context")}
            job = {"model": self.oracle.path, "layout": {"world_size": sizes.world, **keys}}
            run_ranks(train, out, sizes.world, job)
        return out


@pytest.fixture(scope="module")
def laboratory(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("layouts"), oracle)


every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
def test_a_checkpoint_is_exported_bit_for_bit(laboratory, oracle, layout):
    back = load_file(laboratory(layout) / "weights.safetensors")
    assert back.keys() == oracle.weights.keys()
    assert [name for name, tensor in oracle.weights.items() if not torch.equal(back[name], tensor)] == []


@every_layout
def test_gradients_are_those_of_transformers_for_sinks_and_biases_too(laboratory, oracle, layout):
    right = oracle.answers[1]
    assert right.keys() == oracle.weights.keys() and all(tensor.any() for tensor in right.values())
    worst, name = difference(load_file(laboratory(layout) / "gradients.safetensors"), right)
    assert worst <= CASES["gpt-oss"].rounding, name


@every_layout
def test_a_trainers_checkpoint_gives_every_weight_back_bit_for_bit(laboratory, oracle, layout):
    saved, restored = (load_file(laboratory(layout) / f"{kind}.safetensors") for kind in ("after", "restored"))
    assert [name for name, tensor in saved.items() if not torch.equal(restored[name], tensor)] == []
    assert [name for name, tensor in saved.items() if torch.equal(oracle.weights[name], tensor)] == []
