"""Curves of a run's metrics over its steps, one chart per panel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go

from slimx.extras.report.charts import PALETTE, Chart, new_figure, run_length, step_axis, thin
from slimx.extras.report.meanings import about
from slimx.extras.report.panels import FAMILIES, LOGGED, PANELS, Panel, Series, is_sparse, matching
from slimx.observability.tracking.metrics import StepRecord

RUNNING_MEAN_STEPS = 10
MOST_LINES = len(PALETTE)
MOST_LOGGED = 12


def curves(records: Sequence[StepRecord], *, points: int) -> tuple[list[Chart], list[str]]:
    """Returns charts of the panels for which `records` have values, and the titles of the other panels.

    Curves of more than `points` steps are averaged over nearly equally sized groups of consecutive steps."""
    names = metrics_of(records)
    charts: list[Chart] = []
    absent: list[str] = []
    for panel in PANELS:
        present = [series for series in panel.series if series.key in names]
        if present:
            charts.append(_run_panel(panel, present, records, points))
        else:
            absent.append(panel.title)
    charts[1:1] = _families(names, records, points)  # right after the reward
    logged = matching(names, LOGGED)
    for name, label in logged[:MOST_LOGGED]:
        panel = Panel(f"Logged by a hook: {label}", Series(name, "mean"))
        charts.append(_run_panel(panel, panel.series, records, points))
    if len(logged) > MOST_LOGGED:
        left = len(logged) - MOST_LOGGED
        charts[-1].notes.append(f"The table of all metrics contains {left} more metrics that hooks logged.")
    return charts, absent


def _families(names: Collection[str], records: Sequence[StepRecord], points: int) -> list[Chart]:
    charts = []
    for title, pattern in FAMILIES:
        series = [Series(name, label, sparse=is_sparse(name)) for name, label in matching(names, pattern)]
        if series:
            panel = Panel(title, *series[:MOST_LINES], legend=True)
            charts.append(_run_panel(panel, panel.series, records, points))
            left = len(series) - len(panel.series)
            if left:
                charts[-1].notes.append(f"The table of all metrics contains {left} more.")
    return charts


@dataclass(slots=True, frozen=True, kw_only=True)
class Source:
    """Steps and metric of one curve."""

    series: Series
    records: Sequence[StepRecord]
    label: str
    color: str
    mean_label: str = f"mean of {RUNNING_MEAN_STEPS} steps"
    """Name of the running mean in the legend, if the metric has one."""
    run: int | None = None
    """Number of the run, in a chart of several runs, whose page then finds the other values of the x axis by it."""


def _run_panel(panel: Panel, present: Sequence[Series], records: Sequence[StepRecord], points: int) -> Chart:
    sources = []
    for series in present:
        color = PALETTE[panel.series.index(series)]
        sources.append(Source(series=series, records=records, label=series.label, color=color))
    chart = draw_panel(panel, sources, points)
    chart.title = panel.title_of(present)
    if len(present) < len(panel.series):
        chart.figure.update_layout(showlegend=len(present) > 1)
    chart.about = [about(series.key, series.label if len(present) > 1 else "") for series in present]
    return chart


def draw_panel(panel: Panel, sources: Sequence[Source], points: int) -> Chart:
    """Returns the chart of a panel with a curve of at most `points` points for each of `sources`."""
    chart = Chart(title=panel.title, figure=new_figure(height=250))
    chart.figure.update_layout(showlegend=panel.legend, hovermode="x unified")
    if panel.thousands:
        chart.figure.update_yaxes(exponentformat="SI")
    lines = []
    for source in sources:
        series = source.series
        steps, values = _finite(source, chart.notes)
        running = None
        if series.running_mean and values.size > 2 * RUNNING_MEAN_STEPS:
            running = _running_mean(values)
        peak = series.key.endswith("/max")
        if values.size > points:
            summary = "highest" if peak else "mean"
            chart.notes.append(
                f"{source.label}: each point is the {summary} of {run_length(values.size, points)} logged steps."
            )
        line = _Line(source, *thin(steps, values, points, peak))
        lines.append(line)
        if running is not None:
            line.faint = True
            lines.append(_Line(replace(source, label=source.mean_label), *thin(steps, running, points, peak)))
    # The same range in all charts of a run, so that a reader can compare them from top to bottom.
    first = min(source.records[0].step for source in sources)
    last = max(source.records[-1].step for source in sources)
    step_axis(chart.figure, first, last, pad=0.02 * (last - first) or 0.5)
    constant = _constant(lines)
    if panel.log:
        _logarithmic(chart, lines)
    elif constant is not None:
        # plotly would draw a constant in the middle of an axis from -1 to 1, where 2e-4 looks like 0.
        limits = [-0.05, 1.0]
        if constant:
            limits = sorted([0.0, 2 * constant])
        chart.figure.update_yaxes(range=limits)
    for line in lines:
        _draw(chart.figure, line)
    return chart


@dataclass(slots=True)
class _Line:
    """Data and style of one line in a chart."""

    source: Source
    x: np.ndarray
    y: np.ndarray
    faint: bool = False


def metrics_of(records: Sequence[StepRecord]) -> set[str]:
    """Returns the names of all metrics that `records` contain."""
    names: set[str] = set()
    for record in records:
        names.update(record.metrics)
    return names


def measured(records: Sequence[StepRecord], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps that have `metric`, and its values as float64."""
    steps: list[int] = []
    values: list[float] = []
    for record in records:
        if metric in record.metrics:
            steps.append(record.step)
            values.append(record.metrics[metric])
    return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


def _finite(source: Source, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and values of one curve. Non-finite values become NaN, which leaves a gap in the curve, and are
    mentioned in `notes`."""
    key = source.series.key
    steps, values = measured(source.records, key)
    bad = steps[~np.isfinite(values)]
    if bad.size:
        values = np.where(np.isfinite(values), values, np.nan)
        shown = ", ".join(map(str, bad[:8]))
        if bad.size > 8:
            shown += " ..."
        name = key if source.run is None else f"{key} of {source.label}"
        notes.append(f"{name} is not finite at {bad.size} of {steps.size} steps: {shown}.")
    return steps, values


def _logarithmic(chart: Chart, lines: Sequence[_Line]) -> None:
    """Makes the y axis logarithmic, and moves values of exactly 0 from the lines to the bottom of the axis.

    A logarithmic axis has no zero, but exactly 0 is the ideal log-prob gap. A value of 0 is drawn as an open circle at
    an additional tick, one decade below the smallest value."""
    positive = np.concatenate([line.y[line.y > 0] for line in lines])
    low = 0
    high = 0
    if positive.size:
        low = int(np.floor(np.log10(positive.min())))
        high = int(np.ceil(np.log10(positive.max())))
    ticks = {10.0**decade: f"1e{decade}" for decade in range(low, high + 1, 1 + (high - low) // 8)}
    foot = 10.0 ** (low - 1)
    bottom = low
    for line in lines:
        zeros = line.y == 0
        if zeros.any():
            bottom = low - 1
            ticks[foot] = "0"
            chart.notes.append(
                f"{line.source.label}: exactly 0 at {zeros.sum()} of {line.y.size} points (open circles)."
            )
            chart.figure.add_scatter(
                x=line.x[zeros].astype(np.int32),
                y=np.full(zeros.sum(), foot, dtype=np.float32),
                mode="markers",
                marker={"symbol": "circle-open", "color": line.source.color, "size": 5},
                name=line.source.label,
                hovertemplate="0",
                showlegend=False,
                meta=line.source.run,
            )
            line.y = np.where(zeros, np.nan, line.y)
    # From a tick to a tick: plotly.js would end the axis at the data, between two ticks that are then not visible.
    limits = [bottom - 0.1, high + 0.1]
    chart.figure.update_yaxes(type="log", tickvals=list(ticks), ticktext=list(ticks.values()), range=limits)


def _constant(lines: Sequence[_Line]) -> float | None:
    """Returns the value that all points of the lines share; None if they differ."""
    values = np.unique(np.concatenate([line.y[np.isfinite(line.y)] for line in lines]))
    if values.size != 1:
        return None
    return float(values[0])


def _draw(figure: go.Figure, line: _Line) -> None:
    mode = "lines"
    if line.source.series.sparse or _has_lone_point(line.y):
        mode = "lines+markers"
    width = 1.8
    opacity = 1.0
    if line.faint:
        width = 1.0
        opacity = 0.55
    figure.add_scatter(
        x=line.x.astype(np.int32),
        y=line.y.astype(np.float32),
        name=line.source.label,
        mode=mode,
        marker={"size": 5},
        line={"color": line.source.color, "width": width},
        opacity=opacity,
        meta=line.source.run,
        # In a chart of several runs, the running mean stands for both.
        showlegend=not (line.faint and line.source.run is not None),
    )


def _has_lone_point(y: np.ndarray) -> bool:
    """Returns True if a finite value has no finite neighbor. No line is drawn to such a point, so it needs a marker to
    be visible."""
    drawn = np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
    return bool((drawn[1:-1] & ~drawn[:-2] & ~drawn[2:]).any())


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Returns at each point the mean of the last RUNNING_MEAN_STEPS values, or of fewer at the start. NaN values are
    ignored."""
    finite = np.isfinite(values)
    total = np.cumsum(np.where(finite, values, 0.0))
    count = np.cumsum(finite)
    width = RUNNING_MEAN_STEPS
    total[width:] = total[width:] - total[:-width]
    count[width:] = count[width:] - count[:-width]
    return np.divide(total, count, out=np.full(values.size, np.nan), where=count > 0)
