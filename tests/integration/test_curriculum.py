"""A curriculum that follows the policy in whole runs: its level rises, and a resumed run is at the level it had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.levels import WINDOW
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from tests.integration.runs import TrainProcess, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("four whole runs"), pytest.mark.timeout(3600)]

PER_STEP, UP_AFTER, STEPS = 4, 4, 7
assert PER_STEP * UP_AFTER == WINDOW


def trained(directory: Path, model: Path, prompts: Path, *stops: int) -> dict[int, list[str]]:
    """The prompts of each step of a run that ends after each of these steps, and is started again."""
    directory.mkdir()
    config = write_config(
        directory,
        model,
        prompts,
        rollout={"prompts_per_step": PER_STEP, "source": "examples.levels.make_source"},
        reward={"function": "tests.integration.hooks.above_zero"},
        checkpoint={"every": 1},
    )
    for stop in stops:
        run = TrainProcess(config, f"schedule.steps={stop}")
        assert run.wait() == 0, run.text()
        run.assert_nothing_left()
    files = step_files(directory / "run" / DIRECTORY)
    return {step: [group.prompt.id for group in read_step(files[step])[1]] for step in range(1, STEPS + 1)}


def test_the_level_follows_solved_prompts_also_after_a_resume(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (task_of_sums / "train.jsonl").read_text().splitlines()]
    levels = {row["id"]: number % 2 for number, row in enumerate(rows)}
    prompts = tmp_path / "levels.jsonl"
    prompts.write_text("".join(json.dumps(row | {"metadata": {"level": levels[row["id"]]}}) + "\n" for row in rows))
    whole = trained(tmp_path / "whole", tiny_model, prompts, STEPS)
    taken = [levels[prompt] for step in sorted(whole) for prompt in whole[step]]
    assert taken[:WINDOW] == [0] * WINDOW and taken == sorted(taken) and taken[-PER_STEP:] == [1] * PER_STEP
    # The first ends with a window that is not full, the second on the next level.
    assert trained(tmp_path / "resumed", tiny_model, prompts, UP_AFTER - 1, UP_AFTER + 1, STEPS) == whole
