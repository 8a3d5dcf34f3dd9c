"""Checkpoints of whole runs of `slimx train`: from weights of Megatron-LM over demonstrations to another layout, where
preferences are learned."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from slimx.config.load import load_config
from slimx.orchestration.session import run_session
from tests.integration.conftest import Weights
from tests.integration.megatron_stand import megatron_tensors, write_megatron
from tests.integration.runs import TrainProcess, steps, write_config
from tests.refusals import refused

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
PROMPTS = 16
"""Number of demonstrations, all of which each step takes; the second run takes them as pairs."""


@pytest.fixture(scope="module")
def run(tiny_model: Path, tiny_weights: Weights, task_of_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the configuration of a finished run of three steps on one rank; its directory is next to it."""
    directory = tmp_path_factory.mktemp("run")
    prompts = directory / "prompts.jsonl"
    with prompts.open("w") as file:
        for line in (task_of_sums / "demonstrations.jsonl").read_text().splitlines()[:PROMPTS]:
            prompt = json.loads(line)
            prompt["metadata"] = {"rejected": str(int(prompt["answer"]) + 1)}
            file.write(json.dumps(prompt) + "\n")
    config = json.loads((tiny_model / "config.json").read_text())
    tensors = megatron_tensors(tiny_weights, config, per_layer=True)
    write_megatron(directory / "megatron", tensors, directory / "witness")
    file = write_config(
        directory,
        tiny_model,
        prompts,
        trainer={"world_size": 1, "expert": 1, "load": str(directory / "megatron")},
        rollout={
            "prompts": str(prompts),
            "prompts_per_step": PROMPTS,
            "group_size": 1,
            "generate": "demonstrations",
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


def test_configured_checkpoints_and_exports_are_kept(run, tiny_weights):
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


@pytest.mark.slow("a second whole run")
def test_weights_without_optimizer_load_and_learn_preferences(run, tmp_path):
    """The model is what the first run has exported, and its weights are those of that run's checkpoint, so the first
    margin is 0 and its loss ln 2. The chosen answer of each pair is the demonstrated one, the other is one more."""
    prompts = run.parent / "prompts.jsonl"
    checkpoint = run.parent / "run" / "checkpoints" / "iter_0000003"
    config = write_config(
        tmp_path,
        run.parent / "run" / "hf",
        prompts,
        run={"fork": str(checkpoint)},
        rollout={
            "prompts": str(prompts),
            "prompts_per_step": PROMPTS,
            "engines": [],
            "generate": "preferences",
            "sampling": {},
        },
        reward={"function": None},
        algorithm={"name": "dpo", "advantages": {"beta": 0.5}},
        schedule={"steps": 3 + 6},
        checkpoint={"load_optimizer": False},
    )
    with refused("resume.layout", about="trainer.expert") as caught:
        run_session(load_config(config, ["checkpoint.load_optimizer=true"]), Console(quiet=True), None)
    assert "TP1 PP1 VPP1 CP1 DP1 EP1 ETP1" in str(caught.value) and "DP2 EP2" in str(caught.value)
    process = TrainProcess(config)
    assert process.wait() == 0, process.text()
    assert "checkpoint.load_optimizer" in process.text() and f"resumed at step 3 from {checkpoint}" in process.text()
    rows = steps(tmp_path / "run")
    assert sorted(rows) == [*range(4, 10)]
    losses = [rows[step]["dpo/loss"] for step in sorted(rows)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and rows[4]["dpo/groups_without_pair"] == 0
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.6
    assert rows[9]["dpo/accuracy"] == 1.0 and rows[9]["dpo/margin"] > 0
