"""Writes one self-contained HTML page about one or several runs, from what their directories hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slimx.errors import SlimxError
from slimx.observability.report.charts import Chart
from slimx.observability.report.curves import curves
from slimx.observability.report.phase_charts import phase_charts
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.run_files import RunFiles, read_run
from slimx.observability.tracking.samples import Comparison, RecordedSample, compare

# plotly.js alone takes 4.8 MB of the 6 MB that a page may have: the runs share these bounds, which keep the rest small.
CURVE_POINTS = 1200
SAMPLE_ROWS = 24
SAMPLE_CHARACTERS = 3000


def write_report(run_dirs: Sequence[Path], out: Path, title: str) -> None:
    """Writes the page `out` (one file, no network) with a section per run directory, in the order given.

    Reads `metrics.jsonl`, `timeline.jsonl`, `samples.jsonl`, `config.yaml` and `summary.json`; one that is missing or
    damaged is said on the page. Raises SlimxError without a run directory, or for one that holds none of them.
    """
    if not run_dirs:
        raise SlimxError(
            f"no run directory is given for the report {out}; name at least one",
            code="report.runs",
            about=str(out),
        )
    runs = [read_run(Path(directory)) for directory in run_dirs]
    figures = _FigureWriter()
    sections = [_section(run, figures, share=len(runs)) for run in runs]
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    html = pages.get_template("page.html").render(title=title, runs=sections)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8")


@dataclass(slots=True)
class _FigureWriter:
    """Turns figures into HTML; the first one brings plotly.js for the whole page."""

    written: int = 0

    def card(self, chart: Chart) -> dict[str, Any]:
        html = chart.figure.to_html(
            full_html=False,
            include_plotlyjs=self.written == 0,
            div_id=f"chart-{self.written}",
            default_height=f"{chart.figure.layout.height}px",
            config={"displayModeBar": False, "responsive": True},
        )
        self.written += 1
        return {"title": chart.title, "html": html, "notes": chart.notes, "wide": chart.wide}


def _section(run: RunFiles, figures: _FigureWriter, share: int) -> dict[str, Any]:
    """One run as the template shows it; `share` runs divide the page's room."""
    points = max(200, CURVE_POINTS // share)
    blocks = []
    if run.steps:
        charts, absent = curves(run.steps, points=points)
        notes = [f"Not logged in this run: {', '.join(absent)}."] if absent else []
        blocks.append({"title": "Curves", "charts": [figures.card(chart) for chart in charts], "notes": notes})
    elif "metrics.jsonl" not in run.missing:
        run.problems.append("metrics.jsonl holds no step")
    if run.phases:
        charts = phase_charts(run.phases, points=min(points, 300))
        blocks.append(
            {"title": "Where the time goes", "charts": [figures.card(chart) for chart in charts], "notes": []}
        )
    elif "timeline.jsonl" not in run.missing:
        run.problems.append("timeline.jsonl holds no phase")
    comparison = compare(run.samples)
    if comparison is None and "samples.jsonl" not in run.missing:
        run.problems.append("samples.jsonl holds no sample")
    return {
        "name": run.directory.resolve().name,
        "extent": _extent(run),
        "missing": run.missing,
        "problems": run.problems,
        "numbers": [_number(label, value) for label, value in (run.summary or {}).items()],
        "blocks": blocks,
        "samples": None if comparison is None else _samples(comparison, rows=max(4, SAMPLE_ROWS // share)),
        "metrics": _metric_rows(run.steps),
        "config": run.config,
    }


def _extent(run: RunFiles) -> str:
    """Place of the run and what it covers, in one line."""
    parts = [str(run.directory)]
    if run.steps:
        first, last = run.steps[0], run.steps[-1]
        parts.append(f"steps {first.step} to {last.step}")
        versions = [record.version for record in run.steps if record.version is not None]
        if versions:
            parts.append(f"weight versions {min(versions)} to {max(versions)}")
        start = min([first.time, *(phase.start for phase in run.phases)])
        parts.append(f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M} UTC")
        minutes = round((last.time - start) / 60)
        parts.append(f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min")
    return " · ".join(parts)


def _number(label: str, value: Any) -> dict[str, Any]:
    """A headline number: thousands apart, four significant digits; what is no number is shown as text."""
    if isinstance(value, bool):
        return {"label": label, "value": "yes" if value else "no", "text": False}
    if not isinstance(value, (int, float)):
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return {"label": label, "value": text, "text": len(text) > 12}
    return {"label": label, "value": f"{value:,}" if isinstance(value, int) else _digits(value), "text": False}


def _digits(value: float) -> str:
    """Four significant digits, and no fewer than the whole part of a number below a billion."""
    return f"{value:,.0f}" if math.isfinite(value) and 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _samples(comparison: Comparison, rows: int) -> dict[str, Any]:
    kind = "Held-out" if comparison.evaluation else "Training"
    total, shown = len(comparison.pairs), comparison.pairs[:rows]
    steps = [comparison.first] if comparison.first == comparison.last else [comparison.first, comparison.last]
    if len(steps) == 1:
        note = f"{kind} rollouts of step {steps[0]}, the only step that has samples."
    else:
        note = f"{kind} rollouts of steps {steps[0]} and {steps[1]}; {comparison.common} prompts have one at both."
    if total > len(shown):
        note += f" {len(shown)} of {total} prompts are shown, in the order of the file."
    return {
        "note": note,
        "headings": [f"Step {step}" for step in steps],
        "rows": [
            {
                "prompt": _cut(pair.prompt),
                "answer": _cut(pair.answer),
                "cells": [_cell(pair.before, None), _cell(pair.after, pair.before)][: len(steps)],
            }
            for pair in shown
        ],
    }


def _cell(sample: RecordedSample | None, before: RecordedSample | None) -> dict[str, str] | None:
    if sample is None:
        return None
    change = 0.0 if before is None else sample.reward - before.reward
    trend = "up" if change > 0 else "down" if change < 0 else ""
    return {"reward": _digits(sample.reward), "trend": trend, "response": _cut(sample.response)}


def _cut(text: str) -> str:
    """The text, or its beginning and how much is left out."""
    left = len(text) - SAMPLE_CHARACTERS
    return text if left <= 0 else f"{text[:SAMPLE_CHARACTERS]}\n[{left:,} more characters]"


def _metric_rows(steps: Sequence[StepRecord]) -> list[tuple[str, ...]]:
    """Name, count, first, last, lowest, highest of every metric, by name."""
    rows = []
    for key in sorted({key for record in steps for key in record.metrics}):
        values = [record.metrics[key] for record in steps if key in record.metrics]
        numbers = [value for value in values if not math.isnan(value)] or [math.nan]
        shown = (values[0], values[-1], min(numbers), max(numbers))
        rows.append((key, str(len(values)), *(_digits(value) for value in shown)))
    return rows
