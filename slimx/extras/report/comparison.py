"""Comparison of several runs in a report: the same charts with a curve per run, final and best values, and the
differences of their configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from pydantic import ValidationError

from slimx.config.schema import CHECKED, Config
from slimx.config.sections.algorithm import Algorithm
from slimx.errors import SlimxError
from slimx.extras.report.cards import RECENT_STEPS, mean
from slimx.extras.report.charts import PALETTE, Chart
from slimx.extras.report.curves import RUNNING_MEAN_STEPS, Source, draw_panel, measured, metrics_of
from slimx.extras.report.meanings import Best, about, good, shown
from slimx.extras.report.panels import panels_of_one
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.run_files import RunFiles, read_run

POINTS = 1200
"""Maximum number of points of the curves of all runs in a chart."""
AXIS_POINTS = 300
"""Maximum number of steps for which a page contains the other values of the x axis."""
NAMES_OF_RUN = ("run.dir", "run.name")
"""Keys of the configuration that differ in all runs and are not listed."""
NOT_SET = "not set"
type ConfigRow = tuple[str, list[str]]
"""Key of a configuration, and its value in each run as text."""


def read_runs(run_dirs: Sequence[Path]) -> list[RunFiles]:
    """Reads the files of the runs that are compared. Raises SlimxError for fewer than two directories, for a directory
    that is given twice, and for one that contains no run."""
    if len(run_dirs) < 2:
        raise SlimxError(
            f"--compare needs at least two run directories, but only {run_dirs[0]} was given; give another one",
            code="report.compare",
            about=str(run_dirs[0]),
        )
    check_different(run_dirs)
    return [read_run(directory) for directory in run_dirs]


def check_different(run_dirs: Sequence[Path]) -> None:
    """Raises SlimxError for a directory that is given twice."""
    for directory, count in Counter(path.resolve() for path in run_dirs).items():
        if count > 1:
            raise SlimxError(
                f"{directory} was given {count} times; give each run directory once",
                code="report.compare",
                about=str(directory),
            )


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Returns a different name for each directory: its last component, preceded by as many others as are needed."""
    lengths = [1] * len(run_dirs)
    while True:
        names = []
        for directory, length in zip(run_dirs, lengths, strict=True):
            names.append(str(Path(*directory.resolve().parts[-length:])))
        counts = Counter(names)
        if max(counts.values()) == 1:
            return names
        for number, name in enumerate(names):
            lengths[number] += counts[name] > 1


def overlaid(runs: Sequence[Sequence[StepRecord]], names: Sequence[str]) -> list[Chart]:
    """Returns a chart for each metric that at least one of `runs` has, with a curve per run that has the metric.
    `names`: names of the runs. A run has the same color in all charts."""
    logged = [metrics_of(records) for records in runs]
    charts = []
    for panel in panels_of_one(set().union(*logged)):
        (series,) = panel.series
        panel.legend = True
        sources = []
        lacking = []
        for number, (records, name) in enumerate(zip(runs, names, strict=True)):
            if series.key not in logged[number]:
                lacking.append(name)
                continue
            color = PALETTE[number % len(PALETTE)]
            sources.append(Source(series=series, records=records, label=name, color=color, mean_label=name, run=number))
        chart = draw_panel(panel, sources, POINTS // len(runs))
        chart.about = [about(series.key)]
        if any((line.opacity or 1) < 1 for line in chart.figure.data):
            chart.notes.append(f"Strong: mean of {RUNNING_MEAN_STEPS} steps; pale: each step.")
        if lacking:
            chart.notes.append(f"Not logged by {', '.join(lacking)}.")
        charts.append(chart)
    return charts


def x_axes(run: RunFiles) -> dict[str, list[float] | None]:
    """Returns the values that an x axis can have in place of steps, at up to AXIS_POINTS steps of `run`: {step,
    minutes, tokens, samples}, all summed over the run. A list is None if the run has no such values."""
    chosen = np.unique(np.linspace(0, max(0, len(run.steps) - 1), AXIS_POINTS).astype(int))[: len(run.steps)]
    steps = np.zeros(len(run.steps), np.int64)
    seconds = np.zeros(len(run.steps))
    tokens = np.zeros(len(run.steps))
    for number, record in enumerate(run.steps):
        steps[number] = record.step
        seconds[number] = record.metrics.get("time/step", 0.0)
        tokens[number] = seconds[number] * record.metrics.get("perf/tokens_per_second", 0.0)
    sums = {
        "minutes": np.cumsum(np.nan_to_num(seconds)) / 60,
        "tokens": np.cumsum(np.nan_to_num(tokens)),
        "samples": steps * _samples_per_step(run),
    }
    axes: dict[str, list[float] | None] = {"step": steps[chosen].tolist()}
    for name, values in sums.items():
        axes[name] = np.round(values[chosen], 3).tolist() if values.any() else None
    return axes


def _samples_per_step(run: RunFiles) -> int:
    """Returns the number of rollouts that a step trains on; 0 if the configuration does not tell."""
    rollout = _settings(run).get("rollout")
    if not isinstance(rollout, dict):
        return 0
    prompts = rollout.get("prompts_per_step")
    rollouts = rollout.get("group_size")
    return prompts * rollouts if isinstance(prompts, int) and isinstance(rollouts, int) else 0


def value_rows(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Returns a row for each metric that has a chart: {title, metric, cells}, with a cell {final, best, leads} for each
    run, or None for a run without the metric. `leads` is True for the run with the best final value."""
    rows = []
    for panel in panels_of_one(set().union(*(metrics_of(run.steps) for run in runs))):
        (series,) = panel.series
        aim = good(series.key).best
        cells: list[Any] = []
        final: dict[int, float] = {}
        for number, run in enumerate(runs):
            steps, values = measured(run.steps, series.key)
            if not values.size:
                cells.append(None)
                continue
            value = float(values[-1]) if series.sparse else mean(values[-RECENT_STEPS:])
            if np.isfinite(value):
                final[number] = value
            best = _best(series.key, steps, values, aim)
            cells.append({"final": shown(series.key, value), "best": best, "leads": False})
        if aim is not Best.NONE and len({*final.values()}) > 1:
            choose = max if aim is Best.HIGHEST else min
            cells[choose(final, key=final.__getitem__)]["leads"] = True
        rows.append({"title": panel.title, "metric": series.key, "cells": cells})
    return rows


def _best(metric: str, steps: np.ndarray, values: np.ndarray, aim: Best) -> str:
    """Describes the best of `values` and its step; "" for a metric without a best side, and without finite values."""
    if aim is Best.NONE or not np.isfinite(values).any():
        return ""
    best = np.nanargmax(values) if aim is Best.HIGHEST else np.nanargmin(values)
    return f"{shown(metric, float(values[best]))} (step {steps[best]})"


def config_rows(runs: Sequence[RunFiles]) -> tuple[list[ConfigRow], list[ConfigRow]]:
    """Returns the keys of the configurations that differ, each with its value in every run as text: those that a user
    has set in at least one run, and those that are defaults or follow from other keys in all runs."""
    flat = [_flat(_settings(run)) for run in runs]
    chosen: set[str] = set()
    keys: dict[str, None] = {}
    for run, settings in zip(runs, flat, strict=True):
        chosen |= _chosen(_settings(run), settings)
        keys.update(dict.fromkeys(settings))
    written: list[ConfigRow] = []
    others: list[ConfigRow] = []
    for key in keys:
        values = [_value(settings, key) for settings in flat]
        if len({*values}) > 1 and key not in NAMES_OF_RUN:
            rows = written if key in chosen else others
            rows.append((key, values))
    inner = dict(written)
    written = [row for row in written if not any(key.startswith(f"{row[0]}.") for key in inner)]
    return written, others


def _value(settings: dict[str, str], key: str) -> str:
    """Returns the value of `key`, or a word that says whether a run without the value sets parts of the key."""
    if key not in settings and any(other.startswith(f"{key}.") for other in settings):
        return "set"
    return settings.get(key, NOT_SET)


def _chosen(settings: dict[str, Any], flat: dict[str, str]) -> set[str]:
    """Returns those keys of the configuration `settings`, whose leaves are `flat`, that differ from the defaults of
    this version of slimx and from what `algorithm.name` sets, and the keys that contain them. These are all keys of a
    configuration that this version does not accept, such as one of another version."""
    try:
        config = Config.model_validate(settings, context=CHECKED)
        preset = Algorithm(name=config.algorithm.name).model_dump(mode="json")
    except (ValidationError, SlimxError):
        return {*flat}
    fixed = _flat({"algorithm": preset | {"name": None}})
    chosen: set[str] = set()
    for key, value in _flat(config.model_dump(mode="json", exclude_defaults=True)).items():
        if fixed.get(key) != value:
            chosen.update(accumulate(key.split("."), "{}.{}".format))
    return chosen


def _settings(run: RunFiles) -> dict[str, Any]:
    """Returns the configuration of a run; {} if the file is missing or damaged, which the run's problems then tell."""
    if run.config is None:
        return {}
    try:
        values = yaml.safe_load(run.config)
    except yaml.YAMLError:
        values = None
    return values if isinstance(values, dict) else {}


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    """Returns the leaves of nested settings as JSON text, by keys as in overrides, such as
    `rollout.engines.0.name`. The empty name of the only set in `eval.prompts` is left out."""
    out: dict[str, str] = {}
    if isinstance(value, dict) and value:
        for key, item in value.items():
            out |= _flat(item, f"{prefix}.{key}".strip("."))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            out |= _flat(item, f"{prefix}.{number}")
    elif prefix:
        out[prefix] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return out
