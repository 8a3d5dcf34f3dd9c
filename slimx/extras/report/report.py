"""Writes one self-contained HTML page about one or several runs, from the files in their directories."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slimx.errors import SlimxError, duration
from slimx.extras.alerts.log import alert_lines, alerts_of, least_passing
from slimx.extras.report.cards import cards, other_cards
from slimx.extras.report.charts import PALETTE, Chart, PhaseColors
from slimx.extras.report.comparison import (
    check_different,
    config_rows,
    overlaid,
    read_runs,
    run_names,
    value_rows,
    x_axes,
)
from slimx.extras.report.curves import curves
from slimx.extras.report.meanings import TERMS, digits, shown
from slimx.extras.report.phase_charts import phase_charts
from slimx.extras.report.previews import Previews
from slimx.extras.report.samples import sample_table, training_table
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.run_files import RunFiles, read_run
from slimx.observability.tracking.samples import compare

# Limits for all runs of a page together. They keep the content of the runs smaller than plotly.js, which has 0.5 MB.
CURVE_POINTS = 1200
SAMPLE_ROWS = 24
SAMPLE_STEPS = 4
PLOTLY = Path(__file__).with_name("plotly-basic.min.js.gz")
"""plotly.js with only scatter and bar charts (npm's plotly.js-basic-dist-min, compressed with `gzip -9n`), of the
release that belongs to the pinned version of plotly. The browser decompresses it."""


def write_report(run_dirs: Sequence[Path], out: Path, title: str) -> None:
    """Writes the page `out`, one file that needs no network, with a section per run directory. Runs with rollouts come
    first, then supervised runs; otherwise the order is that of `run_dirs`.

    Reads `metrics.jsonl`, `timeline.jsonl`, `samples.jsonl`, `config.yaml` and `summary.json`; the page reports a
    missing or damaged file. Raises SlimxError if `run_dirs` is empty or contains a directory twice, for a directory
    without any of these files, if `out` does not end in .html or .htm, and if the page cannot be written."""
    _check_name(out)
    if not run_dirs:
        raise SlimxError(
            f"no run directory was given for the report {out}; give at least one run directory",
            code="report.runs",
            about=str(out),
        )
    check_different(run_dirs)
    runs = [read_run(Path(directory)) for directory in run_dirs]
    runs.sort(key=lambda run: not _sampled(run))  # stable
    writer = _Writer()
    sections = [_section(run, writer, run_count=len(runs)) for run in runs]
    _write_page(out, title=title, runs=sections, comparison=None)


def write_comparison(run_dirs: Sequence[Path], out: Path, title: str | None) -> None:
    """Writes the page `out` that compares runs: one file that needs no network, with a curve per run in each chart, the
    final and best values, and the keys in which the configurations differ. `title`: title of the page; None: the names
    of the runs.

    Raises SlimxError as `write_report` does, and for fewer than two directories."""
    _check_name(out)
    runs = read_runs(run_dirs)
    names = run_names(run_dirs)
    writer = _Writer()
    heads = []
    for name, run, color in zip(names, runs, cycle(PALETTE), strict=False):
        head = {"name": name, "color": color, "extent": _extent(run)}
        heads.append({**head, "missing": run.missing, "problems": run.problems})
    comparison = {
        "runs": heads,
        "charts": [writer.card(chart) for chart in overlaid([run.steps for run in runs], names)],
        "axes": json.dumps([x_axes(run) for run in runs]),
        "metrics": value_rows(runs),
        "config": config_rows(runs),
    }
    title = title or f"Comparison of {', '.join(names[:-1])} and {names[-1]}"
    _write_page(out, title=title, runs=[], comparison=comparison)


def _check_name(out: Path) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise SlimxError(
            f"--out {out} does not end in .html, but a report is an HTML page; give a name that does",
            code="report.out",
            about=str(out),
        )


def _write_page(out: Path, **values: object) -> None:
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    plotly = b64encode(PLOTLY.read_bytes()).decode()
    html = pages.get_template("page.html").render(terms=TERMS, plotly=plotly, **values)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise SlimxError(
            f"the report {out} cannot be written ({error.strerror}); set --out to a writable file",
            code="report.out",
            about=str(out),
        ) from error


@dataclass(slots=True)
class _Writer:
    """Converter of charts to values for the page's template, with the state that all sections of the page share."""

    written: int = 0
    previews: Previews = field(default_factory=Previews)
    colors: PhaseColors = field(default_factory=PhaseColors)

    def card(self, chart: Chart) -> dict[str, Any]:
        self.written += 1
        return {
            "id": f"chart-{self.written}",
            "title": chart.title,
            "height": chart.figure.layout.height,
            # Inside a script element only "<" could end the element or start a comment.
            "figure": chart.figure.to_json(validate=False).replace("<", r"\u003c"),
            "notes": chart.notes,
            "about": chart.about,
            "wide": chart.wide,
        }


def _sampled(run: RunFiles) -> bool:
    """Returns True if the run has rollouts, False for supervised fine-tuning."""
    return any("response/mean_tokens" in record.metrics or "reward/mean" in record.metrics for record in run.steps)


def _section(run: RunFiles, figures: _Writer, run_count: int) -> dict[str, Any]:
    """Returns the template values for a run's section of the page. The page's size limit is divided by `run_count`, the
    number of runs."""
    points = max(200, CURVE_POINTS // run_count)
    blocks = []
    if run.steps:
        charts, absent = curves(run.steps, points=points)
        notes = []
        if absent and _sampled(run):
            notes.append(f"Not logged in this run: {', '.join(absent)}.")
        blocks.append({"title": "Curves", "charts": [figures.card(chart) for chart in charts], "notes": notes})
    elif "metrics.jsonl" not in run.missing:
        run.problems.append("metrics.jsonl contains no step")
    if run.phases:
        charts = phase_charts(run.phases, points=min(points, 300), colors=figures.colors)
        blocks.append({"title": "Time by phase", "charts": [figures.card(chart) for chart in charts], "notes": []})
    elif "timeline.jsonl" not in run.missing:
        run.problems.append("timeline.jsonl contains no phase")
    comparison = compare(run.samples, columns=SAMPLE_STEPS)
    samples = None
    training = []
    if comparison is not None:
        show = partial(figures.previews.of, run.directory)
        passing = least_passing(run.directory)
        samples = sample_table(comparison, show, passing, rows=max(4, SAMPLE_ROWS // run_count))
        samples["passing"] = digits(passing)
        if comparison.evaluation:
            training = training_table(run.samples, show, passing)
    return {
        "name": run.directory.resolve().name,
        "extent": _extent(run),
        "missing": run.missing,
        "problems": run.problems,
        "alerts": _alerts(run.directory),
        "cards": [*cards(run.steps), *other_cards(run.summary or {}, all_of_them=not run.steps)],
        "blocks": blocks,
        "samples": samples,
        "training": training,
        "metrics": _metric_rows(run.steps),
        "config": run.config,
    }


def _alerts(directory: Path) -> list[str]:
    """Returns a line for each alert of the run in `directory`; [] if it has none, or if its configuration cannot be
    read."""
    try:
        alerts = alerts_of(directory)
    except SlimxError:
        return []
    return list(alert_lines(alerts)) if alerts else []


def _extent(run: RunFiles) -> str:
    """Describes the run's directory, steps, start and duration in one line."""
    parts = [str(run.directory)]
    if run.steps:
        first = run.steps[0]
        last = run.steps[-1]
        parts.append(f"step {last.step}" if first.step == last.step else f"steps {first.step} to {last.step}")
        versions = [record.version for record in run.steps if record.version is not None]
        if versions:
            parts.append(f"weight versions {min(versions)} to {max(versions)}")
        start = min([first.time, *(phase.start for phase in run.phases)])
        parts.append(f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M} UTC")
        parts.append(duration(last.time - start))
    return " · ".join(parts)


def _metric_rows(steps: Sequence[StepRecord]) -> list[tuple[str, ...]]:
    """Returns a row for each metric, sorted by name: name, count, first, last, lowest and highest value."""
    by_key: dict[str, list[float]] = {}
    for record in steps:
        for key, value in record.metrics.items():
            by_key.setdefault(key, []).append(value)
    rows = []
    for key, values in sorted(by_key.items()):
        numbers = [value for value in values if not math.isnan(value)] or [math.nan]
        chosen = (values[0], values[-1], min(numbers), max(numbers))
        rows.append((key, str(len(values)), *(shown(key, value) for value in chosen)))
    return rows
