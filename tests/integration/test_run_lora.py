"""A whole run with low-rank adapters: an engine without adapter support serves the merged weights, another computes
with base and adapters, and a checkpoint belongs to its adapters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from slimx.config.load import load_config
from slimx.extras.convert.command import app
from slimx.extras.lora.targets import adapter_targets
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.orchestration.state.resume import check_resume
from slimx.orchestration.state.saves import read_state
from tests.integration.engine_families import make_model
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.refusals import refused

pytestmark = [pytest.mark.integration, pytest.mark.slow("a whole run of each case")]


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "expert": 1}], ids=["experts", "pipeline"])
def test_engines_serve_merged_weights_and_a_run_goes_on_with_its_adapters(tiny_model, task_of_sums, tmp_path, layout):
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        trainer={"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}, **layout},
        schedule={"steps": 2},
        checkpoint={"export_hf": True},
        algorithm={"reference": True, "kl_coef": 0.01},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    directory = tmp_path / "run"
    assert all(step["gap/max"] < 1e-4 and step["gap/tokens"] > 0 for step in steps(directory).values())
    metrics = steps(directory)
    assert metrics[1]["kl/reference"] <= 1e-8 < metrics[2]["kl/reference"]
    base, merged = load_file(tiny_model / "model.safetensors"), exported(directory / "hf")
    assert base.keys() == merged.keys()
    moved = {name for name, value in base.items() if not torch.equal(value, merged[name])}
    attention = {name for name in base if ".self_attn." in name and name.endswith("_proj.weight")}
    # An expert that no token chose has no gradient.
    assert attention < moved and all(".experts." in name for name in moved - attention)

    saved = max((directory / "checkpoints").glob("iter_*"))
    state = read_state(saved)
    assert state.policies["actor"]["lora"] == {"rank": 4, "alpha": 8.0, "targets": ["attention", "experts"]}
    other = load_config(config, ["trainer.lora.rank=8"])
    with refused("resume.lora"):
        check_resume(saved, state, {"actor": SimpleNamespace(config=other, sizes=sizes_of(other.trainer))})

    result = CliRunner().invoke(
        app, f"adapters-to-peft {directory}/checkpoints {tmp_path}/peft --original {tiny_model}".split()
    )
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 8)
    assert written["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]

    resumed = TrainProcess(config, "schedule.steps=3")
    assert resumed.wait() == 0, resumed.text()
    assert steps(directory)[3]["gap/max"] < 1e-4


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "expert": 1}, {"tensor": 2, "expert": 1}])
def test_a_colocated_run_in_exact_mode_has_no_gap(tiny_model, task_of_sums, tmp_path, layout):
    """In bfloat16, where a second rounding would show; trainers and engine take turns."""
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        numerics={"mode": "exact", "dtype": "bfloat16"},
        trainer={
            "lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts", "router"]},
            "optimizer": {"lr": 1e-2},
            **layout,
        },
        schedule={"steps": 3, "colocate": True},
        algorithm={"reference": True, "kl_coef": 0.01},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    metrics = steps(tmp_path / "run")
    assert len(metrics) == 3
    assert all(step["gap/max"] == 0.0 and step["gap/tokens"] > 0 for step in metrics.values())
    assert metrics[1]["kl/reference"] == 0.0 < metrics[3]["kl/reference"], "the adapters learned"


def exported(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


ALONE = {
    "dense": ("qwen2", "float32", {"world_size": 2, "tensor": 2, "expert": 1}, ["attention", "mlp"]),
    "dense, bfloat16": ("qwen2", "bfloat16", {"world_size": 1, "expert": 1}, ["attention", "mlp"]),
    "experts": (None, "float32", {"world_size": 2, "expert": 1, "pipeline": 2}, ["attention"]),
}
"""Name of a model, the quickstart's by default, dtype, layout of the trainers and targets."""
GAPS = {"float32": ("gap/max", 1e-4), "bfloat16": ("gap/mean", 2e-2)}
"""Metric by dtype, and its bound. In bfloat16 both sides round on the way; adapters move log-probs by 0.08 and more in
the mean after two steps of these tests."""


@pytest.mark.parametrize("case", list(ALONE))
def test_engines_apply_adapters_to_a_base_published_once(tiny_model, task_of_sums, tmp_path, case):
    """The gap is that of merged weights; an engine that is killed gets base and adapters when it is back."""
    name, dtype, layout, targets = ALONE[case]
    model = tiny_model
    if name is not None:
        make_model(name, model := tmp_path / "model")
    config = write_config(
        tmp_path,
        model,
        task_of_sums / "train.jsonl",
        numerics={"dtype": dtype},
        trainer={"lora": {"rank": 4, "alpha": 8, "targets": targets}, "optimizer": {"lr": 1e-2}, **layout},
        publish={"adapters": "alone", "transport": "memory"},
        schedule={"steps": 10},  # some are left when the engine is killed, on a busy machine too
        checkpoint={"export_hf": True},
        algorithm={"reference": True, "kl_coef": 0.01},
    )
    run, directory = TrainProcess(config), tmp_path / "run"
    run.until(lambda: completed_steps(directory) >= 2)
    for server in engines(run):
        server.kill()
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    metrics, (gap, bound) = steps(directory), GAPS[dtype]
    assert all(step[gap] < bound and step["gap/tokens"] > 0 for step in metrics.values())
    assert metrics[1]["kl/reference"] <= 1e-8 < metrics[10]["kl/reference"], (
        "the adapters learned, and engines use them"
    )
    parts = [*adapter_targets(read_model(model).table, targets, 4)]
    few = sum(getattr(torch, dtype).itemsize * math.prod(part.shape) for part in parts) / 2**20
    assert [metrics[step]["publish/mib"] for step in (1, 2)] == [pytest.approx(few)] * 2
    assert [metrics[step]["publish/tensors_verified"] for step in (1, 2)] == [len(parts)] * 2
    timeline = [json.loads(line) for line in (directory / "timeline.jsonl").open()]
    assert any(line["track"] == "engine actor-0" and line["name"] == "restart" for line in timeline)
    assert metrics[10]["publish/engines_verified"] == 1


def engines(run: TrainProcess) -> list[psutil.Process]:
    found = [p for p in run.processes() if "slimx.engines.server.launch" in p.cmdline()]
    assert found
    return found
