"""A reward model of a whole run is, exported, a sequence classifier of transformers, and the judge of a second run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("two whole runs")]
HELD_OUT = 12


@pytest.fixture(scope="module")
def trained(tiny_model: Path, task_of_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run of 12 steps of two updates, on two data-parallel ranks that share the experts."""
    directory = tmp_path_factory.mktemp("reward_model")
    held_out = directory / "held-out.jsonl"
    held_out.write_text("".join((task_of_sums / "heldout-pairs.jsonl").read_text().splitlines(True)[:HELD_OUT]))
    config = write_config(
        directory,
        tiny_model,
        task_of_sums / "pairs.jsonl",
        rollout={
            "prompts_per_step": 32,
            "group_size": 2,
            "engines": [],
            "generate": "preferences",
            "sampling": {},
        },
        reward={"function": None},
        algorithm={"name": "bradley_terry"},
        schedule={"steps": 12, "updates_per_step": 2},
        eval={"prompts": str(held_out), "every": 6},
        checkpoint={"export_hf": True},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    return directory / "run"


def scores(model: torch.nn.Module, several: list[list[int]]) -> list[float]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0, 0].item() for ids in several]


def test_a_reward_model_learns_and_transformers_agrees_on_its_export(trained):
    rows = steps(trained)
    # The first update of the step begins with a head of zeros, where all scores are 0 and the loss is ln 2.
    assert rows[1]["preference/loss"] == pytest.approx(math.log(2), abs=0.2)
    assert rows[12]["preference/loss"] < rows[1]["preference/loss"]
    model = AutoModelForSequenceClassification.from_pretrained(trained / "hf", dtype=torch.float32).eval()
    assert type(model).__name__ == "Qwen3MoeForSequenceClassification"
    tokenizer, differences = AutoTokenizer.from_pretrained(trained / "hf"), []
    for line in (trained.parent / "held-out.jsonl").read_text().splitlines():
        prompt = json.loads(line)
        head = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=False)
        answers = (prompt["answer"], prompt["metadata"]["rejected"])
        ids = [[*head, *tokenizer(a, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for a in answers]
        chosen, rejected = scores(model, ids)
        differences.append(chosen - rejected)
    assert rows[12]["eval/margin"] == pytest.approx(sum(differences) / HELD_OUT, abs=1e-5)
    assert rows[12]["eval/accuracy"] == sum(difference > 0 for difference in differences) / HELD_OUT
    assert abs(rows[12]["eval/margin"]) > 1e-3


def test_a_server_gives_rollouts_the_scores_of_transformers(trained, tiny_model, task_of_sums, tmp_path):
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        rollout={
            "engines": [
                {"name": "actor", "max_total_tokens": 8192},
                {
                    "name": "judge",
                    "frozen": True,
                    "model": str(trained / "hf"),
                    "max_total_tokens": 8192,
                    "sglang": {"is_embedding": True},
                },
            ]
        },
        reward={"function": "reward_model", "options": {"engine": "judge", "ids": True}},
        schedule={"steps": 2},
        track={"report": False, "tensorboard": False, "rollouts": {"every": 1}},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    model = AutoModelForSequenceClassification.from_pretrained(trained / "hf", dtype=torch.float32).eval()
    files = step_files(tmp_path / "run" / DIRECTORY)
    trajectories = [t for file in files.values() for group in read_step(file)[1] for t in group.trajectories]
    assert len(trajectories) == 2 * 4 * 2
    found = [trajectory.reward for trajectory in trajectories]
    assert found == pytest.approx(scores(model, [t.token_ids.tolist() for t in trajectories]), abs=1e-4)
    assert max(found) - min(found) > 1e-3
