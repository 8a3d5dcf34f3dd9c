"""A whole run of a dense model with tied embeddings, trained by Muon, whose rollouts, rewards and filter are hooks of
slime's form, with more groups in flight than a batch: there are no routes to ask engines for, and none are missed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.data.records import Group
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.data.saved.trained_tokens import read_trained
from slimx.orchestration.state.saves import read_state
from tests.integration.engine_families import make_model
from tests.integration.family_oracle import read
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration

STEPS, SIZE, OPEN = 2, 4, 8


@pytest.fixture(scope="module")
def directory(task_of_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model and the finished run."""
    directory = tmp_path_factory.mktemp("dense")
    make_model("qwen2", directory / "model")
    config = write_config(
        directory,
        directory / "model",
        task_of_sums / "train.jsonl",
        trainer={
            "world_size": 2,
            "tensor": 2,
            "expert": 1,
            "distributed_optimizer": False,
            "optimizer": {"kind": "muon", "lr": 1e-3},
        },
        rollout={
            "prompts": str(task_of_sums / "train.jsonl"),
            "prompts_per_step": SIZE,
            "over_sampling": OPEN / SIZE,
            "generate": "slime:tests.integration.slime_hook.noted",
            "options": {"turns": 2, "record": str(directory / "given.jsonl"), "stuck": "g1/0"},
            "filter": "slime:examples.slime_style.differ",
            # One token in five ends a turn: rollouts differ in how often they call their tool.
            "sampling": {"max_new_tokens": 4, "stop_token_ids": list(range(4, 128, 5))},
        },
        reward={"function": "slime:examples.slime_style.right", "options": {"reward_key": "calls"}},
        schedule={"steps": STEPS, "straggler_deadline": 4},
        checkpoint={"export_hf": True},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    return directory


def trained(directory: Path) -> dict[int, list[Group]]:
    """Returns the groups of each step."""
    return {step: read_step(file)[1] for step, file in step_files(directory / "run" / DIRECTORY).items()}


def test_two_trainer_ranks_and_an_engine_agree_after_every_publication(directory):
    rows = steps(directory / "run")
    assert list(rows) == [1, 2]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/max"] <= 1e-4 and row["gap/tokens_unexplained"] == 0
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
    before, exported = read(directory / "model"), read(directory / "run" / "hf")
    assert exported.keys() == before.keys() and "lm_head.weight" not in exported
    moved = {name for name, tensor in exported.items() if not torch.equal(tensor, before[name])}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias"} <= moved


def test_trained_tokens_masks_and_rewards_are_those_of_the_slime_hook(directory):
    records = [json.loads(line) for line in (directory / "given.jsonl").open()]
    rewards = set()
    for step, groups in trained(directory).items():
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for trajectory in trajectories:
            length, prompt = len(trajectory.token_ids), trajectory.spans[0].stop
            # One that is generated anew by the next version stands there again, with the same tokens or others.
            candidates = [hook for hook in records if hook["id"] == trajectory.id]
            hook = next(hook for hook in candidates if hook["tokens"][:length] == trajectory.token_ids.tolist())
            mask = hook["mask"][: length - prompt]
            assert hook["mask"][0] == 0 and sum(hook["mask"]) == sum(mask), "a tool's last words are left off"
            assert trajectory.loss_mask.tolist() == [0] * prompt + mask
            assert trajectory.reward == hook["calls"]
        rewards |= {trajectory.reward for trajectory in trajectories}
        mean = sum(trajectory.reward for trajectory in trajectories) / len(trajectories)
        assert steps(directory / "run")[step]["reward/mean"] == pytest.approx(mean)
    assert len(rewards) > 1


def test_filtered_and_endless_groups_are_counted_and_replaced(directory):
    rows, groups = steps(directory / "run"), trained(directory)
    dropped = [json.loads(line) for line in (directory / "run" / "dropped.jsonl").open()]
    counted = Counter((drop["step"], drop["reason"]) for drop in dropped)
    assert counted[1, "straggler"] and {reason for _, reason in counted} == {"filter: all equal", "straggler"}
    assert all(drop["detail"] for drop in dropped if drop["reason"] == "straggler")
    for step, row in rows.items():
        assert len(groups[step]) == SIZE
        assert all(len({t.reward for t in group.trajectories}) == 2 for group in groups[step])
        reasons = row.get("dropped/filter:_all_equal", 0), row.get("dropped/straggler", 0)
        assert reasons == (counted[step, "filter: all equal"], counted[step, "straggler"])
        assert row["dropped/total"] == sum(reasons)
        # What a synchronous step does not take is aborted, and generated anew by the next version.
        assert row["rollout/regenerated"] == OPEN - SIZE
        assert {t.oldest_version for group in groups[step] for t in group.trajectories} == {step - 1}
    (checkpoint,) = (directory / "run" / "checkpoints").glob("iter_*")
    state = read_state(checkpoint).rollouts
    coming = [ticket.number for ticket in state["tickets"]]
    numbers = [int(group.id[1:]) for several in groups.values() for group in several]
    assert 1 not in numbers + coming
    assert len(set(numbers + coming)) == len(numbers) + len(coming) == STEPS * SIZE + OPEN - SIZE
    assert len(numbers) + len(coming) + len(dropped) == state["next"]


def test_values_of_every_token_are_kept_and_are_those_of_the_metrics(directory):
    for step, file in step_files(directory / "run" / DIRECTORY).items():
        _, groups = read_step(file)
        kept = read_trained(file, groups)
        gaps = []
        for group in groups:
            for trajectory in group.trajectories:
                values, mask = kept[trajectory.id], trajectory.loss_mask > 0
                gaps += np.abs(values.logprobs - trajectory.logprobs)[mask].tolist()
                assert values.other_experts is None and np.isnan(values.advantages[0])
                mean = np.mean([t.reward for t in group.trajectories])
                assert set(np.sign(values.advantages[1:])) == {np.sign(trajectory.reward - mean)}
        row = steps(directory / "run")[step]
        assert max(gaps) == row["gap/max"] and np.mean(gaps) == pytest.approx(row["gap/mean"], rel=1e-6)


def test_logs_say_which_step_and_phase_their_lines_belong_to(directory):
    written = re.compile(r"^==== [\d-]+ [\d:]+ UTC, (.+), step (\d+): (\w+)$", re.MULTILINE)
    for log, name in {"trainer-1.log": "rank 1", "engine-actor-0.log": "engine actor-0"}.items():
        marks = written.findall((directory / "run/logs" / log).read_text())
        assert {who for who, _, _ in marks} == {name}
        done = [(int(step), phase) for _, step, phase in marks]
        assert [step for step, phase in done if phase == "train"] == [1, 2]
        assert done.index((1, "train")) < done.index((1, "publish")) < done.index((2, "generate"))
