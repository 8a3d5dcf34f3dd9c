"""On-policy distillation in a whole run whose teacher is on a server that runs already, and the same rollouts scored by
the same teacher in a trainer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimx.data.codec import save_groups
from slimx.data.step_files import DIRECTORY, read_step, step_files
from slimx.engines.server.engine import Engine
from slimx.runtime.ports import free_port
from tests.integration.conftest import Weights, perturbed, publish
from tests.integration.rank_processes import run_ranks
from tests.integration.runs import TrainProcess, steps, write_config
from tests.integration.trainer_oracle import write_model

pytestmark = pytest.mark.integration
STEPS = 3


def test_a_served_teacher_teaches_as_the_same_teacher_in_the_trainers(
    engine: Engine,
    running: dict[str, Any],
    tiny_model: Path,
    tiny_weights: Weights,
    task_of_sums: Path,
    tmp_path: Path,
) -> None:
    wise = perturbed(tiny_weights, seed=3, scale=0.1)
    teacher = write_model(tmp_path / "teacher", tiny_model, wise)
    asyncio.run(publish(engine, wise, 1))
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        rollout={
            "sampling": {"max_new_tokens": 8},
            "engines": [
                {"name": "actor", "max_total_tokens": 8192},
                {"name": "wise", "frozen": True, **running},
            ],
        },
        reward={"function": None},
        algorithm={"name": "distillation", "teacher_engine": "wise"},
        schedule={"steps": STEPS},
        track={"rollouts": {"every": 1}},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    for step in range(1, STEPS + 1):
        row = rows[step]
        assert row["kl/teacher"] > 0 and row["optim/grad_norm"] > 0 and row["engines/wise/serving"] == 1

    files = step_files(tmp_path / "run" / DIRECTORY)
    groups = [group for step in range(1, STEPS + 1) for group in read_step(files[step])[1]]
    save_groups(tmp_path / "groups.bin", groups)
    job = {
        "out": str(tmp_path),
        "policy": str(tiny_model),
        "teacher": str(teacher),
        "init_method": f"tcp://127.0.0.1:{free_port()}",
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.teacher_rank", tmp_path, 1)
    with np.load(tmp_path / "scores.npz") as arrays:
        scores = list(arrays.values())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(scores) == len(trajectories) == STEPS * 8
    for trajectory, score in zip(trajectories, scores, strict=True):
        trained = trajectory.loss_mask[1:] > 0
        served = trajectory.teacher_logprobs[1:]
        assert trained.any() and np.abs(served[trained] - score[trained]).max() <= 1e-5
        assert np.abs(served[trained] - trajectory.logprobs[1:][trained]).max() > 1e-2  # another model than the policy
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["gradients_differ"] <= 1e-4
    for name in ("loss/policy", "kl/teacher", "optim/grad_norm"):
        assert said["engine"][name] == pytest.approx(said["trainer"][name], rel=1e-3)
