"""Nothing restarts an engine that is late with a thousand requests in its queue and long prompts to read."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from slimx.cluster.connection import start_ray, stop_ray
from slimx.config.load import load_config
from slimx.data.saved.step_files import read_step, step_files
from slimx.extras.generation.checks import without_trainers
from slimx.extras.generation.run import generate
from slimx.extras.generation.serving import serving
from slimx.models.families import configured_model
from slimx.observability.live.table import LiveTable
from slimx.orchestration.start.prepare import check_sources
from slimx.orchestration.state.saves import Saves
from tests.integration.runs import write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("a run with a thousand requests")]

LONG = 32_000
"""Tokens of the long prompt, a character each."""


def test_a_thousand_requests_and_a_long_prompt_restart_nothing(tiny_model: Path, task_of_sums: Path, tmp_path: Path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 2 * LONG}))
    rows = [json.loads(line) for line in (task_of_sums / "train.jsonl").read_text().splitlines()[:250]]
    rows[0]["messages"] = [{"role": "user", "content": "1+" * (LONG // 2)}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = write_config(
        tmp_path,
        model,
        prompts,
        rollout={
            "prompts": str(prompts),
            "prompts_per_step": len(rows),
            "group_size": 4,
            "max_prompt_tokens": LONG + 64,
            "engines": [{"name": "actor", "max_total_tokens": 4 * LONG}],
            "sampling": {"max_new_tokens": 32, "stop_token_ids": [0]},
        },
        schedule={"steps": 1},
    )
    config = without_trainers(load_config(file), None)
    directory = Path(config.run.dir)
    directory.mkdir()
    sources = check_sources(config, configured_model(config), "cpu")

    async def served() -> dict[str, float]:
        table = LiveTable(1, 0, Console(quiet=True))
        async with serving(config, sources, directory, table.note) as service:
            await generate(service, Saves(directory / "cursor", keep=1), None, table, asyncio.Event())
            (engines,) = service.groups.values()
            return engines.members.metrics()

    start_ray(config, "cpu", trainers=False)
    try:
        row = asyncio.run(served())
    finally:
        stop_ray()
    (file,) = step_files(directory / "rollouts").values()
    groups = read_step(file)[1]
    assert sum(len(group.trajectories) for group in groups) == 4 * len(rows)
    assert max(len(trajectory.token_ids) for group in groups for trajectory in group.trajectories) > LONG
    assert (row["engines/lost"], row["engines/restarted"], row["engines/router_restarts"]) == (0, 0, 0)
