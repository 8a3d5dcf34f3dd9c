"""Kill a run at any moment and start it again: it continues as the uninterrupted run would have."""

from __future__ import annotations

import json
import random
import runpy
import signal
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config

pytestmark = pytest.mark.integration
STEPS = 6


def _config(directory: Path, tiny_model: Path, task: Path, concurrency: int) -> Path:
    directory.mkdir()
    prompts = directory / "prompts.jsonl"
    with prompts.open("w") as file:
        for line in (task / "train.jsonl").open():
            prompt = json.loads(line)
            prompt["metadata"]["record"] = str(directory / "tokens.jsonl")
            file.write(json.dumps(prompt) + "\n")
    return write_config(
        directory,
        tiny_model,
        prompts,
        schedule={"steps": STEPS},
        checkpoint={"every": 2},
        rollout={
            "prompts": str(prompts),
            "prompts_per_step": 4,
            "group_size": 2,
            "max_prompt_tokens": 64,
            "sampling": {"max_new_tokens": 4},
            "engines": [{"name": "actor", "max_total_tokens": 8192}],
            "generate": "tests.integration.hooks.recording",
            "concurrency": concurrency,
        },
    )


def _tokens(directory: Path) -> dict[str, list[int]]:
    """Every trajectory's tokens by id; one that was generated twice (before and after a kill) must be the same."""
    out: dict[str, list[int]] = {}
    for line in (directory / "tokens.jsonl").open():
        record = json.loads(line)
        assert out.setdefault(record["id"], record["tokens"]) == record["tokens"], record["id"]
    return out


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("task")
    runpy.run_path(str(ROOT / "tools/quickstart/make_task.py"))["make_task"](out, seed=1)
    return out


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one request at a time."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    process = TrainProcess(_config(directory, tiny_model, task, concurrency=1))
    assert process.wait() == 0, process.text()
    process.assert_nothing_left()
    return directory


LOSS = ("loss/policy", "optim/grad_norm", "kl/rollout", "reward/mean", "gap/mean")


def test_one_request_at_a_time_a_killed_and_resumed_run_has_bitwise_the_same_losses(
    uninterrupted, tiny_model, task, tmp_path
):
    directory = tmp_path / "killed"
    config = _config(directory, tiny_model, task, concurrency=1)
    at = random.randint(2, STEPS - 1)
    first = TrainProcess(config)
    first.until(lambda: completed_steps(directory / "run") >= at)
    first.kill()
    first.wait()
    first.assert_nothing_left()
    second = TrainProcess(config)
    assert second.wait() == 0, second.text()
    assert "resumed at step" in second.text()
    second.assert_nothing_left()
    whole, resumed = steps(uninterrupted / "run"), steps(directory / "run")
    assert whole.keys() == resumed.keys() == {*range(1, STEPS + 1)}
    for step in whole:
        assert [resumed[step][key] for key in LOSS] == [whole[step][key] for key in LOSS], (
            f"killed at {at}, step {step}"
        )
    assert _tokens(directory) == _tokens(uninterrupted)
    assert all(
        row["gap/tokens"] and row["gap/mean"] <= 1e-5 and not row["gap/tokens_unexplained"] for row in whole.values()
    )


def test_killed_while_it_saves_a_run_at_normal_concurrency_resumes_with_the_same_tokens(
    uninterrupted, tiny_model, task, tmp_path
):
    directory = tmp_path / "killed"
    config = _config(directory, tiny_model, task, concurrency=64)
    first = TrainProcess(config)
    checkpoints = directory / "run" / "checkpoints"
    first.until(lambda: (checkpoints / "iter_0000004.partial").exists())
    first.kill(signal.SIGKILL)
    first.wait()
    first.assert_nothing_left()
    assert [path.name for path in checkpoints.glob("iter_???????")] == ["iter_0000002"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    second = TrainProcess(config)
    assert second.wait() == 0, second.text()
    assert "resumed at step 2" in second.text()
    whole, resumed = steps(uninterrupted / "run"), steps(directory / "run")
    assert _tokens(directory) == _tokens(uninterrupted)
    for step in whole:
        for key in ("loss/policy", "reward/mean"):
            assert abs(resumed[step][key] - whole[step][key]) <= 1e-4, (step, key)
