"""A real server without trainers: it samples from the checkpoint that it was given, as version 0."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slimx.cluster.connection import start_ray, stop_ray
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.data.records import Group, Trajectory
from slimx.data.saved.step_files import origin_of, read_step, step_files
from slimx.extras.evaluation.run import evaluate_once
from slimx.extras.generation.checks import without_trainers
from slimx.extras.generation.run import generate
from slimx.extras.generation.serving import serving
from slimx.models.families import configured_model
from slimx.observability.live.table import LiveTable
from slimx.orchestration.start.prepare import Sources, check_sources
from slimx.orchestration.state.saves import Saves
from slimx.rollout.flow.replay import check_replay
from tests.integration.conftest import Weights, perturbed
from tests.integration.runs import write_config
from tests.refusals import refused

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def logprobs(model: Any, trajectory: Trajectory) -> np.ndarray:
    """Of the sampled tokens, by transformers."""
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    with torch.no_grad():
        found = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return found.numpy()[trajectory.versions()[1:] >= 0]


async def both(config: Config, sources: Sources, directory: Path) -> dict[str, Any]:
    """Two generated steps, then an evaluation, by the same engines."""
    table = LiveTable(2, 0, Console(quiet=True))
    async with serving(config, sources, directory, table.note) as service:
        saves = Saves(directory / "cursor", keep=1)
        await generate(service, saves, None, table, asyncio.Event())
        return await evaluate_once(service)


def test_engines_alone_generate_and_evaluate_a_checkpoint(
    tiny_model: Path, tiny_weights: Weights, task_of_sums: Path, tmp_path: Path
):
    checkpoint = tmp_path / "other"  # as an export: weights and configuration, but no tokenizer
    checkpoint.mkdir()
    shutil.copy(tiny_model / "config.json", checkpoint)
    save_file(perturbed(tiny_weights, seed=3), checkpoint / "model.safetensors", metadata={"format": "pt"})
    spoilt = tmp_path / "spoilt"
    shutil.copytree(checkpoint, spoilt)
    head = tiny_weights["lm_head.weight"] * float("nan")
    save_file(tiny_weights | {"lm_head.weight": head}, spoilt / "model.safetensors", metadata={"format": "pt"})
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join((task_of_sums / "heldout.jsonl").read_text().splitlines(keepends=True)[:8]))
    file = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        schedule={"steps": 2, "max_staleness": 1},
        eval={"prompts": {"sums": str(held_out)}, "samples": 4, "temperature": 1.0, "passing": 0.2},
    )
    config = without_trainers(load_config(file), checkpoint)
    directory = Path(config.run.dir)
    directory.mkdir()
    sources = check_sources(config, configured_model(config), "cpu")
    start_ray(config, "cpu", trainers=False)
    try:
        with refused("checkpoint.finite", about="lm_head.weight"):
            asyncio.run(both(without_trainers(load_config(file), spoilt), sources, tmp_path / "spoilt-run"))
        found = asyncio.run(both(config, sources, directory))
    finally:
        stop_ray()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    files = step_files(directory / "rollouts")
    assert list(files) == [1, 2]
    groups: list[Group] = [group for path in files.values() for group in read_step(path)[1]]
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.oldest_version == 0 and trajectory.reward is not None
        sampled = trajectory.logprobs[trajectory.versions() >= 0]
        np.testing.assert_allclose(logprobs(model, trajectory), sampled, atol=2e-5)
    assert len({group.prompt.id for group in groups}) == 8
    check_replay(directory, origin_of(config, sources.policies["actor"].tokenizer), first=1, last=2, routes=False)
    metrics = found["metrics"]
    assert found["checkpoint"] == str(checkpoint) and found["prompts"] == {"sums": 8} and metrics["eval/failed"] == 0
    # Any digit passes: no reward that is not 0 is smaller.
    assert 0 < metrics["eval/sums/accuracy"] <= metrics["eval/sums/pass@2"] <= metrics["eval/sums/pass@4"] <= 1
