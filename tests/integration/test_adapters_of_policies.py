"""Two policies whose adapters one engine has, beside the base that both share: whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.layout.adapters import adapter_targets
from slimx.models.families import read_model
from slimx.orchestration.state.saves import read_state
from tests.integration.engine_families import make_model
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.test_run_lora import engines, exported

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]
TARGETS = ["attention", "mlp"]
POLICIES = ("", "policy/judge/")
"""Beginning of the names of each policy's metrics."""


def test_one_engine_generates_for_two_policies_each_with_its_own_adapters(task_of_sums: Path, tmp_path: Path) -> None:
    """Log-probs are those of each policy's trainer; an engine that is killed gets the base and both adapters when it is
    back; and a resumed run goes on with both."""
    make_model("qwen2", model := tmp_path / "model")
    config = write_config(
        tmp_path,
        model,
        task_of_sums / "train.jsonl",
        trainer={
            "world_size": 1,
            "expert": 1,
            "lora": {"rank": 4, "alpha": 8, "targets": TARGETS},
            "optimizer": {"lr": 1e-2},
        },
        rollout={
            "prompts": str(task_of_sums / "train.jsonl"),
            "generate": "tests.integration.policy_hooks.answered_and_judged",
        },
        reward={"function": "tests.integration.policy_hooks.opposed"},
        policies={
            "judge": {"engines_of": "actor", "trainer": {"lora": {"alpha": 16}, "optimizer": {"lr": 2e-2}}},
        },
        publish={"adapters": "alone"},
        schedule={"steps": 4},
        checkpoint={"every": 2, "export_hf": True},
    )
    run, directory = TrainProcess(config), tmp_path / "run"
    run.until(lambda: completed_steps(directory) >= 2)
    servers = engines(run)
    ports = {server.cmdline()[server.cmdline().index("--port") + 1] for server in servers}
    assert len(ports) == 1, "one server for both"
    for server in servers:
        server.kill()
    assert run.wait(3000) == 0, run.text()
    run.assert_nothing_left()
    resumed = TrainProcess(config, "schedule.steps=5")
    assert resumed.wait(3000) == 0, resumed.text()

    said = steps(directory)
    assert [*said] == [1, 2, 3, 4, 5]
    parts = [*adapter_targets(read_model(model).table, TARGETS, 4)]
    few = sum(4 * math.prod(part.shape) for part in parts) / 2**20
    for prefix in POLICIES:
        for step, metrics in said.items():
            assert metrics[f"{prefix}gap/tokens"] > 0 and metrics[f"{prefix}gap/max"] < 1e-4, (prefix, step)
        assert [said[step][f"{prefix}publish/mib"] for step in (1, 2, 5)] == [pytest.approx(few)] * 3
        assert [said[step][f"{prefix}publish/tensors_verified"] for step in (1, 2)] == [len(parts)] * 2
    timeline = [json.loads(line) for line in (directory / "timeline.jsonl").open()]
    assert any(line["track"] == "engine actor-0" and line["name"] == "restart" for line in timeline)

    for step, file in step_files(directory / DIRECTORY).items():
        for group in read_step(file)[1]:
            for trajectory in group.trajectories:
                sampled = [span for span in trajectory.spans if span.source == "sampled"]
                assert {(span.policy, span.version) for span in sampled} == {(trajectory.policy, step - 1)}
    base = load_file(model / "model.safetensors")
    actor, judge = exported(directory / "hf"), exported(directory / "hf" / "policies" / "judge")
    for name in base:
        if name.endswith("_proj.weight"):
            one, other = actor[name] - base[name], judge[name] - base[name]
            assert one.any() and other.any() and not torch.equal(one, other)
        else:
            assert torch.equal(actor[name], judge[name])
    state = read_state(directory / "checkpoints" / "iter_0000004")
    assert state.lora["alpha"] == 8 and state.policies["judge"]["lora"]["alpha"] == 16
