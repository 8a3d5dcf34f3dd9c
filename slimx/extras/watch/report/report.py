"""Writes one self-contained HTML page about one or several runs, from what their directories hold."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slimx.errors import SlimxError
from slimx.extras.watch.report.charts import Chart, PhaseColours
from slimx.extras.watch.report.curves import curves
from slimx.extras.watch.report.phase_charts import phase_charts
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.run_files import RunFiles, read_run
from slimx.observability.tracking.samples import Comparison, RecordedSample, compare, spread

# The runs of a page share these bounds: they keep what is said of a run below the 0.5 MB that plotly.js takes.
CURVE_POINTS = 1200
SAMPLE_ROWS = 24
SAMPLE_STEPS = 4
TRAINING_ROWS = 20
SAMPLE_CHARACTERS = 3000
PEAK = "trainer memory at its peak, MiB"
"""Begins the labels of the summary's numbers of memory, one for each phase."""
PLOTLY = Path(__file__).with_name("plotly-basic.min.js.gz")
"""plotly.js with scatter and bar charts alone (npm's plotly.js-basic-dist-min, through `gzip -9n`), of the release that
the pinned plotly was made for. The browser unpacks it."""


def write_report(run_dirs: Sequence[Path], out: Path, title: str) -> None:
    """Writes the page `out` (one file, no network) with a section per run directory: first those with rollouts, then
    the supervised ones, each in the order given.

    Reads `metrics.jsonl`, `timeline.jsonl`, `samples.jsonl`, `config.yaml` and `summary.json`; one that is missing or
    damaged is said on the page. Raises SlimxError without a run directory, for one that holds none of them, and for a
    page that cannot be written.
    """
    if not run_dirs:
        raise SlimxError(
            f"no run directory is given for the report {out}; name at least one",
            code="report.runs",
            about=str(out),
        )
    runs = [read_run(Path(directory)) for directory in run_dirs]
    runs.sort(key=lambda run: not _sampled(run))  # stable
    writer = _Writer()
    sections = [_section(run, writer, share=len(runs)) for run in runs]
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    html = pages.get_template("page.html").render(
        title=title, runs=sections, plotly=b64encode(PLOTLY.read_bytes()).decode()
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise SlimxError(
            f"{out}: cannot be written ({error.strerror}); name another file", code="report.out", about=str(out)
        ) from error


@dataclass(slots=True)
class _Writer:
    """Turns figures into what the page's script draws, and remembers what the whole page shares."""

    written: int = 0
    colours: PhaseColours = field(default_factory=PhaseColours)

    def card(self, chart: Chart) -> dict[str, Any]:
        self.written += 1
        return {
            "id": f"chart-{self.written}",
            "title": chart.title,
            "height": chart.figure.layout.height,
            # Inside a script element only "<" could end it or begin a comment.
            "figure": chart.figure.to_json(validate=False).replace("<", r"\u003c"),
            "notes": chart.notes,
            "wide": chart.wide,
        }


def _sampled(run: RunFiles) -> bool:
    """Returns True if the run has rollouts, as opposed to supervised fine-tuning."""
    return any("response/mean_tokens" in record.metrics or "reward/mean" in record.metrics for record in run.steps)


def _section(run: RunFiles, figures: _Writer, share: int) -> dict[str, Any]:
    """One run as the template shows it; `share` runs divide the page's room."""
    points = max(200, CURVE_POINTS // share)
    blocks = []
    if run.steps:
        charts, absent = curves(run.steps, points=points)
        notes = [f"Not logged in this run: {', '.join(absent)}."] if absent and _sampled(run) else []
        blocks.append({"title": "Curves", "charts": [figures.card(chart) for chart in charts], "notes": notes})
    elif "metrics.jsonl" not in run.missing:
        run.problems.append("metrics.jsonl holds no step")
    if run.phases:
        charts = phase_charts(run.phases, points=min(points, 300), colours=figures.colours)
        blocks.append(
            {"title": "Where the time goes", "charts": [figures.card(chart) for chart in charts], "notes": []}
        )
    elif "timeline.jsonl" not in run.missing:
        run.problems.append("timeline.jsonl holds no phase")
    comparison = compare(run.samples, columns=SAMPLE_STEPS)
    return {
        "name": run.directory.resolve().name,
        "extent": _extent(run),
        "missing": run.missing,
        "problems": run.problems,
        "numbers": [_number(label, value) for label, value in _joined(run.summary or {}).items()],
        "blocks": blocks,
        "samples": None if comparison is None else _samples(comparison, rows=max(4, SAMPLE_ROWS // share)),
        "training": _training(run.samples) if comparison is not None and comparison.evaluation else [],
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


def _joined(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary with one number for the memory of all phases: the highest, with the name of its phase."""
    peaks = {label: value for label, value in summary.items() if label.startswith(PEAK)}
    if len(peaks) < 2:
        return dict(summary)
    highest = max(peaks, key=lambda label: peaks[label])
    return {label: value for label, value in summary.items() if label not in peaks or label == highest}


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
    total, shown, steps = len(comparison.rows), comparison.rows[:rows], comparison.steps
    if len(steps) == 1:
        note = f"{kind} rollouts of step {steps[0]}, the only step that has samples."
    else:
        listed = ", ".join(map(str, steps[:-1]))
        note = f"{kind} rollouts of steps {listed} and {steps[-1]}; {comparison.common} prompts have one at the first "
        note += "and the last."
    if total > len(shown):
        note += f" {len(shown)} of {total} prompts are shown, in the order of the file."
    return {
        "note": note,
        "headings": [f"Step {step}" for step in steps],
        "rows": [
            {
                "prompt": _cut(row.prompt),
                "answer": _cut(row.answer),
                "cells": [_cell(sample, row.samples[0]) for sample in row.samples],
            }
            for row in shown
        ],
    }


def _training(samples: Sequence[RecordedSample]) -> list[dict[str, Any]]:
    """The first training rollout of each recorded step, TRAINING_ROWS at most, spread over the run."""
    first: dict[int, RecordedSample] = {}
    for sample in samples:
        if not sample.evaluation:
            first.setdefault(sample.step, sample)
    return [
        {"step": step, "prompt": _cut(first[step].prompt), "answer": _cut(first[step].answer or "")}
        | {"cell": _cell(first[step], None)}
        for step in spread(sorted(first), TRAINING_ROWS)
    ]


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
