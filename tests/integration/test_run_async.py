"""Whole runs that generate ahead: publications in the middle of rollouts, and rollouts that each step interrupts."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slimx.data.records import Trajectory
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.extras.watch.status import run_status
from tests.integration.runs import TrainProcess, completed_steps, saved_tickets, steps, write_config

pytestmark = pytest.mark.integration

TOKENS = 256
"""Random weights hardly ever end a turn, and a step takes less time than these."""


def trained(run: Path) -> dict[int, list[Trajectory]]:
    """Returns the trajectories that each step has trained."""
    files = step_files(run / DIRECTORY)
    return {step: [t for g in read_step(file)[1] for t in g.trajectories] for step, file in files.items()}


def open_groups(run: Path) -> int:
    """Returns the number of open groups by `slimx status`; 0 where it reports none yet."""
    activity = run_status(run)["activity"]
    return activity["rollouts"]["open"] if activity and activity["step"] else 0


def versions_of(trajectory: Trajectory) -> list[int]:
    return [span.version for span in trajectory.spans if span.version is not None]


def test_generation_runs_through_publications_within_the_bound(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path, workers: int
):
    rollout: dict[str, Any] = {
        "workers": workers,
        "sampling": {"max_new_tokens": 2 * TOKENS},
        "engines": [{"name": "actor", "max_total_tokens": 16384}],
    }
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join((task_of_sums / "heldout.jsonl").read_text().splitlines(keepends=True)[:2]))
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        schedule={"steps": 4, "max_staleness": 2},
        rollout=rollout | {"generate": "tests.integration.hooks.across_a_publication"},
        eval={"prompts": {"sums": str(held_out)}, "every": 2, "samples": 2, "temperature": 1.0, "passing": 4},
        reward={"function": "tests.integration.hooks.version_in_evaluations"},
    )
    run = TrainProcess(config)
    run.until(lambda: completed_steps(tmp_path / "run") >= 1)
    seen = [0]
    run.until(lambda: seen.append(open_groups(tmp_path / "run")) or seen[-1] >= 4)
    assert seen[-1] <= 12
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    # The reward of an evaluation's answers is the one version that sampled them: that of the step which has the result.
    evaluated = {step: row for step, row in rows.items() if "eval/accuracy" in row}
    assert [*evaluated] == [0, 2, 4]
    for step, row in evaluated.items():
        assert row["eval/sums/accuracy"] == row["eval/accuracy"] == step and row["eval/failed"] == 0
        assert row["eval/sums/pass@2"] == (step == 4)
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").open()]
    assert {(sample["step"], sample["version"]) for sample in samples if sample["evaluation"]} == {
        (n, n) for n in evaluated
    }
    assert rows.pop(0) and rows.keys() == {*range(1, 5)}
    assert max(row["staleness/max"] for row in rows.values()) == 2
    assert any(row["staleness/mixed"] > 0 for row in rows.values())
    assert all(row["rollout/regenerated"] == row["dropped/total"] == 0 for row in rows.values())
    # A publication makes the engine compute the KV of running requests again, so later tokens agree with the trainer.
    assert all(row["gap/mean"] <= 1e-5 for row in rows.values() if row["gap/tokens"])
    mixed = 0
    for step, trajectories in trained(tmp_path / "run").items():
        for trajectory in trajectories:
            versions = versions_of(trajectory)
            assert all(older < newer for older, newer in pairwise(versions))
            assert step - 1 - 2 <= versions[0] and versions[-1] <= step - 1
            assert trajectory.loss_mask.sum() == len(trajectory.sampled_ids()), "tokens of all versions are trained"
            mixed += len(versions) > 1
    assert mixed >= 4
    run.assert_nothing_left()


@pytest.mark.slow("a whole run and its resumption")
def test_partial_rollouts_continue_in_the_next_step_and_after_a_stop(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path, workers: int
):
    """Half-done rollouts are in the checkpoint that SIGUSR1 writes, token for token; what older versions sampled is not
    trained."""
    rollout = {
        "sampling": {"max_new_tokens": TOKENS},
        "engines": [{"name": "actor", "max_total_tokens": 16384}],
        "partial": True,
        "over_sampling": 2,
        "workers": workers,
    }
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        schedule={"steps": 5, "max_staleness": 2, "window": 1, "colocate": True},
        rollout=rollout | {"concurrency": 12},  # the last groups in the queue cannot be done when the first are
        algorithm={"mask_stale_tokens": True},
        checkpoint={"every": 0},
    )
    first = TrainProcess(config)
    first.until(lambda: completed_steps(tmp_path / "run") >= 2)
    first.kill(signal.SIGUSR1)
    assert first.wait() == 75, first.text()
    first.assert_nothing_left()
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("iter_*")
    tickets = saved_tickets(checkpoint)
    begun = {
        f"g{ticket.number}/{rollout.index}": entry.completion
        for ticket in tickets
        for rollout in ticket.rollouts
        for entry in rollout.completions
    }
    assert begun and any(len(completion.token_ids) for completion in begun.values())
    second = TrainProcess(config)
    assert second.wait() == 0, second.text()
    second.assert_nothing_left()
    everything = trained(tmp_path / "run")
    assert everything.keys() == {1, 2, 3, 4, 5}
    found = {trajectory.id: trajectory for trajectories in everything.values() for trajectory in trajectories}
    assert len(found) == 5 * 8, "none was trained twice"
    kept = begun.keys() & found.keys()
    assert kept
    for name in kept:
        sampled = found[name].sampled_ids().tolist()
        before = begun[name].token_ids.tolist()
        assert sampled[: len(before)] == before
        prompt = found[name].spans[0].stop
        old = [(span.start - prompt, span.stop - prompt, span.version) for span in found[name].spans[1:]]
        assert [span[2] for span in begun[name].versions] == [span[2] for span in old][: len(begun[name].versions)]
    rows = steps(tmp_path / "run")
    assert max(row["staleness/max"] for row in rows.values()) <= 2
    assert any(row["staleness/mixed"] > 0 for row in rows.values())
    assert all(row["gap/mean"] <= 1e-5 for row in rows.values() if row["gap/tokens"])
