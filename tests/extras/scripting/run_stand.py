"""A run's directory as a run writes it, for what reads it."""

from __future__ import annotations

from pathlib import Path

from slimx.data.records import Group
from slimx.data.saved.step_files import StepFiles, origin_of
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord
from slimx.orchestration.state.directory import write_config
from tests.extras.generation.serving_stand import config_in
from tests.extras.rewards.reward_stand import trajectory
from tests.unit.rollout.rollout_stand import prompts, the_tokenizer


def made_group() -> Group:
    made = [trajectory(sampled) for sampled in (1, 3)]
    made[0].reward, made[1].reward = 1.0, -0.5
    return Group(id="g", prompt=prompts()[0], trajectories=made)


def write_run(directory: Path, model: Path) -> None:
    """Writes a run of two steps, of which the second has saved rollouts."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_in(directory, model)
    write_config(config, directory)
    file = JsonlFile(directory / "metrics.jsonl", resume_step=0)
    for step in (1, 2):
        metrics = {"reward/mean": step / 4, "time/step": 1.0, "loss/policy": float("nan")}
        if step == 2:
            metrics["eval/accuracy"] = 0.5
        file.write(StepRecord(step=step, version=step - 1, time=0.0, metrics=metrics).to_json())
    file.close()
    origin = origin_of(config, the_tokenizer())
    StepFiles(directory / "rollouts", origin, every=1, keep=0, resume_step=0).write(2, 1, [made_group()], {})
