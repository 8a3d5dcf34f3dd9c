"""Curves of a run's metrics over its steps, one chart per panel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from slimx.extras.report.charts import PALETTE, Chart, new_figure, run_length, step_axis, thin
from slimx.extras.report.meanings import about
from slimx.observability.tracking.metrics import StepRecord

RUNNING_MEAN_STEPS = 10


@dataclass(slots=True, frozen=True)
class Series:
    """Metric that a panel draws as a curve."""

    key: str
    label: str
    running_mean: bool = False
    """True to draw the metric faintly, overlaid with its running mean over RUNNING_MEAN_STEPS steps."""
    sparse: bool = False
    """True for a metric that is measured only at some steps and is therefore drawn with markers."""


class Panel:
    """Chart with one or more curves. `log`: True for a logarithmic axis; `thousands`: True for ticks such as 110k
    instead of 1.1e5; `legend`: True for a legend even if there is a single curve."""

    def __init__(
        self, title: str, *series: Series, log: bool = False, thousands: bool = False, legend: bool = False
    ) -> None:
        self.title = title
        self.series = series
        self.log = log
        self.thousands = thousands
        self.legend = legend or len(series) > 1


PANELS = (
    Panel(
        "Reward and held-out reward",
        Series("reward/mean", "sampled reward", running_mean=True),
        Series("eval/accuracy", "held-out reward (reward model: accuracy)", sparse=True),
    ),
    Panel(
        "Fraction of groups without signal and of truncated responses",
        Series("reward/groups_without_signal", "groups without signal"),
        Series("response/truncated", "truncated"),
    ),
    Panel(
        "Response length, tokens",
        Series("response/mean_tokens", "mean"),
        Series("response/max_tokens", "longest"),
        Series("response/passed_mean_tokens", "correct answers"),
        Series("response/failed_mean_tokens", "wrong answers"),
    ),
    Panel("Entropy of the policy, nats", Series("policy/entropy", "entropy")),
    Panel("Loss", Series("loss/policy", "policy"), Series("loss/sft", "supervised"), Series("value/loss", "critic")),
    Panel(
        "Fraction of clipped tokens", Series("loss/clip_fraction", "policy"), Series("value/clip_fraction", "critic")
    ),
    Panel("KL divergence from the reference", Series("kl/reference", "KL")),
    Panel("Gradient norm", Series("optim/grad_norm", "norm"), Series("critic/grad_norm", "critic")),
    Panel("Log-prob gap (train-inference mismatch)", Series("gap/mean", "mean"), Series("gap/max", "max"), log=True),
    Panel(
        "Tokens with a gap above 1e-5",
        Series("gap/tokens_above_1e-5", "all"),
        Series("gap/tokens_other_routes", "routed to other experts"),
    ),
    Panel("Learning rate", Series("optim/lr", "rate"), Series("critic/lr", "critic")),
    Panel("Staleness (off-policy lag), versions", Series("staleness/mean", "mean"), Series("staleness/max", "max")),
    Panel("Turns per rollout", Series("rollout/turns_mean", "mean"), Series("rollout/turns_max", "max")),
    Panel("Tokens per second", Series("perf/tokens_per_second", "tokens/s"), thousands=True),
)

FAMILIES = (
    ("Parts of the reward, mean", re.compile(r"reward/part/(.+)/mean")),
    ("Reward by data set", re.compile(r"source/(.+)/reward")),
    ("Held-out reward by data set", re.compile(r"eval/(.+)/accuracy")),
    ("Reward of further policies", re.compile(r"policy/([^/]+)/reward/mean")),
    ("Held-out reward of further policies", re.compile(r"policy/([^/]+)/eval/accuracy")),
    ("Loss of further policies", re.compile(r"policy/([^/]+)/loss/policy")),
    ("Log-prob gap of further policies, mean", re.compile(r"policy/([^/]+)/gap/mean")),
)
"""Panels for metrics whose names are not fixed, as (title, pattern of the names). A panel has one curve per matching
metric."""
LOGGED = re.compile(r"hook/(.+)/mean")
"""Pattern of the names of metrics that hooks logged; each of these metrics is drawn in a separate panel."""
MOST_LINES = len(PALETTE)
MOST_LOGGED = 12


def curves(records: Sequence[StepRecord], *, points: int) -> tuple[list[Chart], list[str]]:
    """Returns charts of the panels for which `records` have values, and the titles of the other panels.

    Curves of more than `points` steps are averaged over nearly equally sized groups of consecutive steps."""
    logged_names: set[str] = set()
    for record in records:
        logged_names.update(record.metrics)
    names = sorted(logged_names)
    charts: list[Chart] = []
    absent: list[str] = []
    for panel in PANELS:
        present = [series for series in panel.series if series.key in names]
        if present:
            charts.append(_panel(panel, present, records, points))
        else:
            absent.append(panel.title)
    charts[1:1] = _families(names, records, points)  # right after the reward
    logged = _matching(names, LOGGED)
    for name, label in logged[:MOST_LOGGED]:
        panel = Panel(f"Logged by a hook: {label}", Series(name, "mean"))
        charts.append(_panel(panel, panel.series, records, points))
    if len(logged) > MOST_LOGGED:
        left = len(logged) - MOST_LOGGED
        charts[-1].notes.append(f"The table of all metrics contains {left} more metrics that hooks logged.")
    return charts, absent


def _matching(names: Sequence[str], pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Returns those of `names` that match `pattern`, each with the text that the pattern's group matched."""
    out = []
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            out.append((name, match[1]))
    return out


def _families(names: Sequence[str], records: Sequence[StepRecord], points: int) -> list[Chart]:
    charts = []
    for title, pattern in FAMILIES:
        series = [Series(name, label, sparse=name.startswith("eval/")) for name, label in _matching(names, pattern)]
        if series:
            panel = Panel(title, *series[:MOST_LINES], legend=True)
            charts.append(_panel(panel, panel.series, records, points))
            left = len(series) - len(panel.series)
            if left:
                charts[-1].notes.append(f"The table of all metrics contains {left} more.")
    return charts


def _panel(panel: Panel, present: Sequence[Series], records: Sequence[StepRecord], points: int) -> Chart:
    chart = Chart(title=panel.title, figure=new_figure(height=250))
    chart.figure.update_layout(showlegend=panel.legend, hovermode="x unified")
    if panel.thousands:
        chart.figure.update_yaxes(exponentformat="SI")
    lines = []
    for series in present:
        label = series.label if len(present) > 1 else ""
        chart.about.append(about(series.key, label))
        steps, values = _measured(series, records, chart.notes)
        running = None
        if series.running_mean and values.size > 2 * RUNNING_MEAN_STEPS:
            running = _running_mean(values)
        peak = series.key.endswith("/max")
        if values.size > points:
            summary = "highest" if peak else "mean"
            chart.notes.append(
                f"{series.label}: each point is the {summary} of {run_length(values.size, points)} logged steps."
            )
        line = _Line(
            series.label, PALETTE[panel.series.index(series)], *thin(steps, values, points, peak), series.sparse
        )
        lines.append(line)
        if running is not None:
            line.faint = True
            x, y = thin(steps, running, points, peak)
            lines.append(_Line(f"mean of {RUNNING_MEAN_STEPS} steps", line.color, x, y, series.sparse))
    # The same range in all charts of a run, so that a reader can compare them from top to bottom.
    first = records[0].step
    last = records[-1].step
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

    label: str
    color: str
    x: np.ndarray
    y: np.ndarray
    sparse: bool
    faint: bool = False


def _measured(series: Series, records: Sequence[StepRecord], notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and values of one metric. Non-finite values become NaN, which leaves a gap in the curve, and
    are mentioned in `notes`."""
    measured_steps: list[int] = []
    measured_values: list[float] = []
    for record in records:
        if series.key in record.metrics:
            measured_steps.append(record.step)
            measured_values.append(record.metrics[series.key])
    steps = np.array(measured_steps, dtype=np.int64)
    values = np.array(measured_values)
    bad = steps[~np.isfinite(values)]
    if bad.size:
        values = np.where(np.isfinite(values), values, np.nan)
        shown = ", ".join(map(str, bad[:8]))
        if bad.size > 8:
            shown += " ..."
        notes.append(f"{series.key} is not finite at {bad.size} of {steps.size} steps: {shown}.")
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
            chart.notes.append(f"{line.label}: exactly 0 at {zeros.sum()} of {line.y.size} points (open circles).")
            chart.figure.add_scatter(
                x=line.x[zeros].astype(np.int32),
                y=np.full(zeros.sum(), foot, dtype=np.float32),
                mode="markers",
                marker={"symbol": "circle-open", "color": line.color, "size": 5},
                name=line.label,
                hovertemplate="0",
                showlegend=False,
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
    if line.sparse or _has_lone_point(line.y):
        mode = "lines+markers"
    width = 1.8
    opacity = 1.0
    if line.faint:
        width = 1.0
        opacity = 0.55
    figure.add_scatter(
        x=line.x.astype(np.int32),
        y=line.y.astype(np.float32),
        name=line.label,
        mode=mode,
        marker={"size": 5},
        line={"color": line.color, "width": width},
        opacity=opacity,
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
