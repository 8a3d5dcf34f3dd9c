"""The recipe of long agents in its smallest form: a real policy whose agent delegates, summarizes and repairs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimx.data.records import Trajectory
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.extras.boxes import rootfs
from tests.integration.conftest import ROOT
from tests.integration.runs import DEADLINE_S, TrainProcess, steps

pytestmark = pytest.mark.integration

SMALL = ROOT / "examples/repair/agents.yaml"
RECIPE = ROOT / "configs/moe/glm-4.5-air-agents.yaml"
OF_THE_MACHINE = {"rollout.engines", "rollout.options.agent_options.toolbox_options.box", "rollout.sampling"}
"""Keys whose mappings depend on the machine and the model."""


def keys(value: Any, path: str = "") -> set[str]:
    """Returns the paths of all keys below a mapping."""
    if not isinstance(value, dict) or path in OF_THE_MACHINE:
        return {path}
    return set().union(*(keys(each, f"{path}.{name}" if path else name) for name, each in value.items()))


def test_the_smallest_form_of_long_agents_has_the_recipes_keys() -> None:
    small, recipe = yaml.safe_load(SMALL.read_text()), yaml.safe_load(RECIPE.read_text())
    for section in ("rollout", "reward", "algorithm", "schedule"):
        assert keys({section: small[section]}) == keys({section: recipe[section]})
    for name in ("generate", "map", "affinity"):
        assert small["rollout"][name] == recipe["rollout"][name]
    assert small["rollout"]["options"]["agent"] == recipe["rollout"]["options"]["agent"]
    for config in (small, recipe):
        assert config["trainer"]["context"] > 1 and config["trainer"]["recompute"]["granularity"] == "selective"
        context = config["rollout"]["max_prompt_tokens"] + config["rollout"]["sampling"]["max_new_tokens"]
        assert context <= config["trainer"]["max_tokens_per_microbatch"], "a whole conversation is trained on"


@pytest.mark.slow("a whole run of a minute")
@pytest.mark.needs("bwrap", "unshare", "prlimit", "tar")
def test_agents_delegate_and_summarize_in_a_whole_run(tmp_path: Path) -> None:
    make = [
        sys.executable,
        ROOT / "examples/environments/make.py",
        "--out",
        tmp_path / "data",
        "--answers",
        '["Done."]',
    ]
    subprocess.run(make, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    config = Path(shutil.copy(SMALL, tmp_path))
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        process = TrainProcess(
            config,
            f"run.dir={tmp_path / 'run'}",
            f"model.path={tmp_path / 'data/model'}",
            f"rollout.options.agent_options.toolbox_options.box.base={base}",
            f"cluster.start_deadline={DEADLINE_S}",
            f"trainer.deadline={DEADLINE_S}",
        )
        assert process.wait() == 0, process.text()
        process.assert_nothing_left()
        assert list(Path(base).glob(f"{rootfs.PREFIX}*")) == [], "no sandbox is left behind"
    metrics = steps(tmp_path / "run")
    assert len(metrics) == 2
    assert all(step["gap/max"] < 1e-4 and step["optim/grad_norm"] > 0 for step in metrics.values())
    rollouts: dict[str, list[Trajectory]] = defaultdict(list)
    for file in step_files(tmp_path / "run" / DIRECTORY).values():
        for group in read_step(file)[1]:
            for trajectory in group.trajectories:
                rollouts[trajectory.rollout_id].append(trajectory)
    assert len(rollouts) == 16
    results = []
    for trajectories in rollouts.values():
        result = trajectories[0].metadata["result"]
        results.append(result)
        assert all(each.metadata["result"] == result and each.loss_mask.any() for each in trajectories)
        assert {each.reward for each in trajectories} == {result["tests"]}
        # A rollout may end with a summary, from which nothing is sampled.
        parts = len(trajectories) - result["sub_agents"]
        assert max(1, result["compactions"]) <= parts <= 1 + result["compactions"], json.dumps(result)
    assert {result["tests"] for result in results} == {0.0, 1.0}
    assert any(result["sub_agents"] and result["compactions"] for result in results)
    # SGLang has no prefix cache in deterministic mode on a CPU, so that nothing can be cached here.
    assert all(result["prompt_tokens"] > 0 for result in results)
