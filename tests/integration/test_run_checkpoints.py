"""Checkpoints of whole runs of `slimx train`, from weights of Megatron-LM to another layout."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.conftest import ROOT, Weights
from tests.integration.megatron_stand import megatron_tensors, write_megatron
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tiny_weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a finished run of three steps on one rank; its directory is beside it."""
    directory = tmp_path_factory.mktemp("run")
    runpy.run_path(str(ROOT / "tools/quickstart/make_task.py"))["make_task"](directory, seed=1)
    config = json.loads((tiny_model / "config.json").read_text())
    tensors = megatron_tensors(tiny_weights, config, per_layer=True)
    write_megatron(directory / "megatron", tensors, directory / "witness")
    file = write_config(
        directory,
        tiny_model,
        directory / "demonstrations.jsonl",
        trainer={"world_size": 1, "expert": 1, "load": str(directory / "megatron")},
        rollout={
            "prompts": str(directory / "demonstrations.jsonl"),
            "group_size": 1,
            "generate": "slimx.rollout.demonstrations.generate",
            "engines": [],
            "sampling": {},
        },
        reward={"function": None},
        algorithm={"name": "sft"},
        schedule={"steps": 3},
        checkpoint={"every": 1, "keep": 1, "keep_every": 2, "export_every": 2, "export_hf": True},
    )
    process = TrainProcess(file)
    assert process.wait() == 0, process.text()
    return file


def test_what_was_asked_for_is_kept_and_exported(run, tiny_weights):
    directory = run.parent / "run"
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert kept == ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]
    exports = {name: load_file(next((directory / name).glob("*.safetensors"))) for name in ("hf-000002", "hf")}
    for weights in exports.values():
        assert {name: tensor.shape for name, tensor in weights.items()} == {
            name: tensor.shape for name, tensor in tiny_weights.items()
        }
    for name, began in tiny_weights.items():
        # Three Adam steps of 1e-3 away from the weights that Megatron-LM's directory held; an expert may get no token.
        moved = (exports["hf"][name] - began).abs().max().item()
        assert moved <= 3.6e-3 and (moved > 0 or ".experts." in name), (name, moved)
    assert any((exports["hf"][name] != exports["hf-000002"][name]).any() for name in tiny_weights)
    assert not (run.parent / "witness").exists()


def test_a_layout_that_the_optimizer_cannot_go_to_is_refused_and_reached_without_it(run):
    wider = ["schedule.steps=4", "trainer.world_size=2", "trainer.expert=2"]
    refused = TrainProcess(run, *wider)
    assert refused.wait() == 2
    assert "TP1 PP1 VPP1 CP1 DP1 EP1 ETP1" in refused.text() and "DP2 EP2" in refused.text()
    assert "starting" not in refused.text().lower()
    resumed = TrainProcess(run, *wider, "checkpoint.load_optimizer=false")
    assert resumed.wait() == 0, resumed.text()
    assert "checkpoint.load_optimizer" in resumed.text() and "resumed at step 3" in resumed.text()
    assert sorted(steps(run.parent / "run")) == [1, 2, 3, 4]
