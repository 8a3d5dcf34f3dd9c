"""Several trained policies in whole runs: each learns what its own rewards say, one checkpoint holds them all, and two
roles of one policy train as one policy does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slimx.config.sections.policies import ACTOR
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.orchestration.state.saves import read_state
from slimx.trainer.checkpoint.files import read_manifest
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("whole runs of two policies"), pytest.mark.timeout(3600)]
HOOKS = "tests.integration.policy_hooks"
STEPS = 3
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tiny_model: Path, task_of_sums: Path) -> Train:
    """Trains STEPS steps in a directory, one rank and one engine for each policy; the run's directory."""

    def run(directory: Path, *overrides: str, **sections: dict[str, Any]) -> Path:
        directory.mkdir(exist_ok=True)
        # One request at a time: what else is in an engine's batch changes the last bits of log-probs.
        rollout = {"generate": f"{HOOKS}.answered_and_judged", "concurrency": 1, **sections.pop("rollout", {})}
        config = write_config(
            directory,
            tiny_model,
            task_of_sums / "train.jsonl",
            trainer={"world_size": 1, "expert": 1},
            rollout={"prompts": str(task_of_sums / "train.jsonl"), "prompts_per_step": 2, **rollout},
            reward={"function": f"{HOOKS}.opposed"},
            schedule={"steps": STEPS},
            checkpoint={"every": 2, "keep": 2, "export_hf": True},
            **sections,
        )
        process = TrainProcess(config, *overrides)
        assert process.wait(3000) == 0, process.text()
        return directory / "run"

    return run


JUDGE = {"judge": {"trainer": {"optimizer": {"lr": 3e-3}}}}


@pytest.fixture(scope="module")
def two(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("two"), policies=JUDGE)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def measured(directory: Path, *names: str) -> list[list[float]]:
    return [[metrics[name] for name in names] for metrics in steps(directory).values()]


def test_each_policy_trains_on_its_trajectories_with_its_settings(two: Path) -> None:
    trained = steps(two)
    assert [*trained] == list(range(1, STEPS + 1))
    for metrics in trained.values():
        assert metrics["optim/lr"] == pytest.approx(1e-3) and metrics["policy/judge/optim/lr"] == pytest.approx(3e-3)
        # Both sides of each policy are the same weights: engines have what its own trainers published.
        for prefix in ("", "policy/judge/"):
            assert metrics[f"{prefix}gap/tokens"] > 0 and metrics[f"{prefix}gap/max"] < 1e-3
            assert metrics[f"{prefix}engines/serving"] == 1
            assert metrics[f"{prefix}publish/tensors_verified"] > 0
    for file in step_files(two / DIRECTORY).values():
        for group in read_step(file)[1]:
            by_rollout: dict[str, list[str]] = {}
            for trajectory in group.trajectories:
                by_rollout.setdefault(trajectory.rollout_id, []).append(trajectory.policy)
                sampled = {span.policy for span in trajectory.spans if span.source == "sampled"}
                assert sampled == {trajectory.policy}
            assert all(policies == ["actor", "judge"] for policies in by_rollout.values())
    actor, judge = weights(two / "hf"), weights(two / "hf" / "policies" / "judge")
    assert actor.keys() == judge.keys() and any(not torch.equal(actor[name], judge[name]) for name in actor)


def test_a_resumed_run_of_several_policies_equals_the_whole_one(two: Path, train: Train, tmp_path: Path) -> None:
    state = read_state(two / "checkpoints" / "iter_0000002")
    assert state.policies.keys() == {ACTOR, "judge"}
    assert state.policies["judge"]["layout"] == state.policies[ACTOR]["layout"]
    assert any(name.startswith("policies/judge/") for name in read_manifest(two / "checkpoints" / "iter_0000002"))
    train(tmp_path, "schedule.steps=2", policies=JUDGE)
    resumed = train(tmp_path, policies=JUDGE)
    for part in (Path("hf"), Path("hf/policies/judge")):
        whole, again = weights(two / part), weights(resumed / part)
        assert all(torch.equal(whole[name], again[name]) for name in whole)
    names = ("loss/policy", "policy/judge/loss/policy", "reward/mean", "policy/judge/reward/mean")
    assert measured(two, *names) == measured(resumed, *names)


def test_both_policies_learn_to_maximize_their_rewards(train: Train, tmp_path: Path) -> None:
    """From random weights: the actor to write digits, the judge to write letters."""
    task = ("rollout.prompts_per_step=4", "rollout.group_size=8", "rollout.concurrency=64", "schedule.steps=40")
    directory = train(tmp_path, *task, f"reward.function={HOOKS}.digits_or_letters", policies=JUDGE)
    # Three seeds (2026-11-26): 0.15 to 0.20 and 0.38 to 0.48 become 0.99 and 1.00.
    for rewards in zip(*measured(directory, "reward/mean", "policy/judge/reward/mean"), strict=True):
        assert sum(rewards[:5]) / 5 < 0.6 and sum(rewards[-5:]) / 5 > 0.8


@pytest.mark.parametrize(
    ("credit", "learns"), [("own", (True, True)), ("shared", (False, False)), ("hook", (False, True))]
)
def test_each_policy_learns_from_what_credit_gives_it_alone(
    credit: str, learns: tuple[bool, bool], train: Train, tmp_path: Path
) -> None:
    """One policy earns what the other loses: shared, that is the same for every rollout."""
    value = f"{HOOKS}.to_the_judge" if credit == "hook" else credit
    directory = train(tmp_path, f"reward.function={HOOKS}.taking_sides", algorithm={"credit": value}, policies=JUDGE)
    for norms in measured(directory, "optim/grad_norm", "policy/judge/optim/grad_norm"):
        assert tuple(norm > 0 for norm in norms) == learns
    for file in step_files(directory / DIRECTORY).values():
        earned = [trajectory.reward for group in read_step(file)[1] for trajectory in group.trajectories]
        assert {*earned} == {0.0, 1.0}, "as it was earned, whatever counts"


def test_two_roles_of_one_policy_train_as_one_policy_to_the_last_bit(train: Train, tmp_path: Path) -> None:
    roles = train(tmp_path / "roles", policies={"judge": {"shares": "actor"}})
    alone = train(tmp_path / "alone", rollout={"generate": f"{HOOKS}.answered_twice"})
    one, other = weights(roles / "hf"), weights(alone / "hf")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not (roles / "hf" / "policies").exists()
    names = ("loss/policy", "reward/mean", "gap/mean", "optim/grad_norm")
    assert measured(roles, *names) == measured(alone, *names)
