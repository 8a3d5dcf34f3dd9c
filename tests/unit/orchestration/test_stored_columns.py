"""A run whose groups are stored elsewhere trains on the same rows, and writes the same files."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slimx.data.saved.codec import encode
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of, read_step, step_files
from slimx.data.saved.trained_tokens import SUFFIX, TrainedTokens
from slimx.data.stored import StoredTrajectory, summarize
from slimx.orchestration.loop import train
from slimx.orchestration.run import Run
from slimx.orchestration.state.saves import Saves, read_state
from tests.unit.data.stored_stand import HeldColumns
from tests.unit.orchestration.run_stand import LIMIT_S, Parts, lines, run_of, stopped
from tests.unit.rollout.rollout_stand import the_tokenizer

TIMED = ("perf/", "time/", "rollout/", "memory/")


class Trainers(Parts):
    """Trainers whose log-probs are -1 everywhere."""

    async def trained_tokens(self, updates: Any, rows: Any) -> list[TrainedTokens]:
        return [
            TrainedTokens.of_row(row, np.full(len(row), -1.0), np.zeros(len(row), bool))
            for part in rows
            for row in part
        ]


def store_groups(run: Run) -> list[HeldColumns]:
    """Makes the run store its groups, and returns their handles."""
    handles: list[HeldColumns] = []
    make = run.maker.make

    def store(group: Any) -> HeldColumns:
        handles.append(HeldColumns(group))
        return handles[-1]

    async def stored(*arguments: Any, **named: Any) -> Any:
        outcome = await make(*arguments, **named)
        return replace(outcome, group=summarize(outcome.group, store))

    run.maker.make = stored
    return handles


async def outcome_of(directory: Path, parts: Parts, *, stored: bool) -> dict[str, Any]:
    """Returns what a run of three steps trains on and writes."""
    run = run_of(directory, parts, schedule__steps=3, schedule__max_staleness=1, track__samples_every=9)
    handles = store_groups(run) if stored else []
    files = StepFiles(directory / DIRECTORY, origin_of(run.config, the_tokenizer()), every=1, keep=0, resume_step=0)
    run.records.rollouts = files
    await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    newest = Saves(directory / "checkpoints", keep=2).newest()
    state = read_state(newest).rollouts
    assert all(type(one.group.trajectories[0]) is not StoredTrajectory for one in state["tickets"] if one.group)
    assert bool(handles) == stored
    metrics = []
    for line in lines(directory / "metrics.jsonl"):
        metrics.append({name: value for name, value in line["metrics"].items() if not name.startswith(TIMED)})
    steps = [read_step(path) for path in step_files(directory / DIRECTORY).values()]
    tokens = [path.read_bytes() for path in sorted((directory / DIRECTORY).glob(f"*{SUFFIX}"))]
    return {
        "rows": parts.rows,
        "metrics": metrics,
        "steps": [(about, _untimed(groups)) for about, groups in steps],
        "tokens": tokens,
    }


def _untimed(groups: list[Any]) -> bytes:
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.timings = {}
    return encode(groups)


async def test_a_run_of_stored_groups_is_that_of_whole_ones(tmp_path, parts):  # `parts` replaces the publisher
    outcomes = []
    for kept in (False, True):
        outcomes.append(await outcome_of(tmp_path / str(kept), Trainers(), stored=kept))
    plain, stored = outcomes
    assert plain == stored and len(plain["rows"]) == len(plain["steps"]) == len(plain["tokens"]) == 3
