"""Metrics and rollouts of a run as tables, read from the run's directory: `slimx.metrics` and `slimx.rollouts`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import SupportsIndex

from slimx.config.schema import Config
from slimx.errors import SlimxError, safe_repr
from slimx.extras.scripting.rows import Rows
from slimx.extras.watch.rollouts import Choice, step_of, steps_of
from slimx.json_types import Json
from slimx.observability.tracking.run_files import check_run, read_run

Run = str | os.PathLike[str] | Config
"""A run: its directory, a result of `slimx.train`, or its configuration."""


def directory_of(run: Run) -> Path:
    """Returns the directory of `run`. Raises SlimxError if there is no run in it, or if it is no path."""
    if not isinstance(run, str | os.PathLike | Config):
        raise SlimxError(
            f"run is {safe_repr(run)}; pass the directory of a run, or a result of slimx.train",
            code="script.run",
            about="run",
        )
    directory = Path(run.run.dir if isinstance(run, Config) else run).expanduser()
    check_run(directory)
    return directory


def metrics(run: Run) -> Rows:
    """Returns the metrics of a run, which may be in progress: one row per step with step, version (of the engines'
    weights), time (Unix time in seconds) and every metric by its name (docs/metrics.md). Raises SlimxError for a
    directory without a run."""
    rows = Rows()
    for record in read_run(directory_of(run)).steps:
        rows.append({"step": record.step, "version": record.version, "time": record.time, **record.metrics})
    return rows


def rollouts(run: Run, step: int | None = None, *, group: str | None = None, reward_below: float | None = None) -> Rows:
    """Returns the rollouts that a run was trained on: one row per response of `step`, or without `step` one row per
    saved step.

    `group`: id of the only group to return. `reward_below`: exclusive upper bound on rewards. A response has group,
    prompt, answer, response (its sampled text), reward, parts (of the reward), status, tokens (sampled), staleness and
    advantage (mean over its tokens). Raises SlimxError for a missing step or group, and for `group` or `reward_below`
    without `step`."""
    directory = directory_of(run)
    if step is None:
        for name, value in (("group", group), ("reward_below", reward_below)):
            if value is not None:
                raise SlimxError(
                    f"slimx.rollouts: {name}={value!r} selects among the responses of one step; pass step=N",
                    code="rollouts.options",
                    about=name,
                )
        return Rows(steps_of(directory)["steps"])
    if not isinstance(step, SupportsIndex):
        raise SlimxError(
            f"slimx.rollouts: step is {safe_repr(step)}; pass a whole number", code="rollouts.options", about="step"
        )
    rows = Rows()
    for values in step_of(directory, step, Choice(group=group, reward_below=reward_below, limit=0))["groups"]:
        for trajectory in values["trajectories"]:
            rows.append(_row(values, trajectory))
    return rows


def _row(group: Json, trajectory: Json) -> Json:
    sampled = [part["text"] for part in trajectory["parts"] if part["source"] == "sampled"]
    return {
        "group": group["id"],
        "prompt": group["prompt"]["text"],
        "answer": group["prompt"]["answer"],
        "response": "\n".join(sampled),
        "reward": trajectory["reward"],
        "parts": trajectory["reward_parts"],
        "status": trajectory["status"],
        "tokens": trajectory["tokens"]["sampled"],
        "staleness": trajectory["staleness"],
        "advantage": trajectory.get("advantage"),
    }
