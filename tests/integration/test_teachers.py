"""A whole run with two served teachers, which the prompts' metadata chooses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimx.data.records import Trajectory
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from tests.integration.conftest import Weights, perturbed
from tests.integration.runs import TrainProcess, steps, write_config
from tests.integration.trainer_oracle import write_model

TOP = 16
pytestmark = [pytest.mark.integration, pytest.mark.slow("a whole run with two teachers")]


def scores(model: Path, trajectory: Trajectory) -> np.ndarray:
    """Returns log-probs of every token at every position by transformers, float32 [L-1, V]."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]).logits[0, :-1]
    return logits.log_softmax(-1).numpy()


def reverse_kl(policy: np.ndarray, teacher: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Returns KL(policy || teacher) [n] over the tokens `top` [n, k] and all others as one; log-probs [n, V]."""
    p, q = (np.take_along_axis(np.exp(logprobs.astype(np.float64)), top, 1) for logprobs in (policy, teacher))
    p, q = (np.concatenate([probs, 1 - probs.sum(1, keepdims=True)], 1) for probs in (p, q))
    return (p * np.log(p / q)).sum(1)


def test_each_of_two_teachers_scores_the_rollouts_of_its_prompts(
    tiny_model: Path, tiny_weights: Weights, task_of_sums: Path, tmp_path: Path
) -> None:
    models = {
        name: write_model(tmp_path / name, tiny_model, perturbed(tiny_weights, seed=seed, scale=0.1))
        for name, seed in (("odd", 3), ("even", 4))
    }
    lines = (task_of_sums / "train.jsonl").read_text().splitlines()[:32]
    rows = [json.loads(line) for line in lines]
    for number, row in enumerate(rows):
        row["metadata"] = {**row.get("metadata", {}), "kind": ("one", "two")[number % 2]}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engines = [
        {"name": "actor", "max_total_tokens": 8192},
        *(
            {"name": name, "frozen": True, "model": str(path), "max_total_tokens": 8192}
            for name, path in models.items()
        ),
    ]
    config = write_config(
        tmp_path,
        tiny_model,
        prompts,
        schedule={"steps": 2},
        rollout={"prompts": str(prompts), "sampling": {"max_new_tokens": 8}, "engines": engines},
        algorithm={
            "name": "distillation",
            "teacher_engines": {"one": "odd", "two": "even"},
            "teacher_field": "kind",
            "teacher_top_k": TOP,
            "teacher_kl_coef": 0.5,
        },
        reward={"function": None},
        track={"rollouts": {"every": 1}},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    rows_of_run = steps(tmp_path / "run")
    assert all(row["kl/teacher"] > 0 for row in rows_of_run.values())
    taught = {"one": models["odd"], "two": models["even"]}
    seen = set()
    kls: list[np.ndarray] = []
    for step, file in step_files(tmp_path / "run" / DIRECTORY).items():
        for group in read_step(file)[1]:
            kind = group.prompt.metadata["kind"]
            seen.add(kind)
            for trajectory in group.trajectories:
                trained = np.flatnonzero(trajectory.loss_mask[1:])
                labels = trajectory.token_ids[1:][trained]
                served = trajectory.teacher_logprobs[1:][trained]
                for name, model in taught.items():
                    gap = np.abs(scores(model, trajectory)[trained, labels] - served).max()
                    assert gap <= 1e-4 if name == kind else gap > 1e-2
                whole = scores(taught[kind], trajectory)[trained]
                top = trajectory.teacher_top_ids[1:][trained]
                assert np.abs(np.take_along_axis(whole, top, 1) - np.sort(whole)[:, : -TOP - 1 : -1]).max() <= 1e-4
                assert (
                    np.abs(trajectory.teacher_top_logprobs[1:][trained] - np.sort(whole)[:, : -TOP - 1 : -1]).max()
                    <= 1e-4
                )
                if step == 1:
                    kls.append(reverse_kl(scores(tiny_model, trajectory)[trained], whole, top))
    assert rows_of_run[1]["kl/teacher_top"] == pytest.approx(float(np.concatenate(kls).mean()), rel=1e-3)
    assert seen == {"one", "two"}
