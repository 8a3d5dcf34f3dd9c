"""Charts of time: seconds by phase for each step, and the phases of the last steps on parallel tracks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slimx.errors import duration
from slimx.extras.report.charts import GRID, Chart, PhaseColors, new_figure, run_length, step_axis, thin
from slimx.extras.report.meanings import About, about
from slimx.observability.tracking.phases import Phase, Placed, place

GANTT_STEPS = 6
GANTT_ROWS = 24
REST = ", rest"
"""End of the name of a phase that contains other phases, in the legend."""
PHASE_WORDS = {
    "publish": "weight sync, from trainers to engines",
    "eval": "answers to held-out prompts",
    "save_wait": "wait until a checkpoint is written",
    "checkpoint": "writes a checkpoint while the run goes on",
}
"""Words for phases whose names do not say what they are."""
TRACKS = About(
    label="",
    metric="time/{phase}",
    meaning="Start and end of each phase; tracks are processes and activities that run at the same time.",
    good="No long empty stretch: trainers or engines are idle there.",
)
"""Explanation of the Gantt chart."""


def phase_charts(phases: Sequence[Phase], *, points: int, colors: PhaseColors) -> list[Chart]:
    """Returns a chart of the seconds per phase in each step, and a Gantt chart of the last GANTT_STEPS steps by track;
    [] if there are no phases.

    `points`: maximum number of bars; if there are more steps, consecutive ones are averaged. `colors`: colors of phases
    on the page."""
    placed = place(phases)
    by_name: dict[str, str] = {}
    for item in placed:
        name = item.phase.name
        if name not in by_name:
            by_name[name] = colors.of(name)
    charts = _seconds_by_phase(placed, by_name, points)
    tracks = _gantt(placed, by_name)
    if charts and tracks:
        _name_further(charts[0], tracks[0])
    return [*charts, *tracks]


def _name_further(chart: Chart, tracks: Chart) -> None:
    """Adds the phases that only the Gantt chart `tracks` contains, because they belong to no step, to the legend of the
    chart above it."""
    named = {bar.name for bar in chart.figure.data}
    for bar in tracks.figure.data:
        if not named & {bar.name, f"{bar.name}{REST}"}:
            chart.figure.add_bar(x=[None], y=[None], name=bar.name, marker=bar.marker)


def _steps(placed: Sequence[Placed]) -> list[int]:
    """Returns the steps to which the phases belong, in ascending order."""
    return sorted({item.phase.step for item in placed if item.phase.step is not None})


def _seconds_by_phase(placed: Sequence[Placed], colors: dict[str, str], points: int) -> list[Chart]:
    steps = _steps(placed)
    if not steps:
        return []
    position = {step: index for index, step in enumerate(steps)}
    seconds = {name: np.zeros(len(steps)) for name in colors}
    outside: dict[str, float] = defaultdict(float)
    parents: set[str] = set()
    tracks: set[str] = set()
    for item in placed:
        name = item.phase.name
        step = item.phase.step
        if item.self_seconds < item.phase.seconds:
            parents.add(name)
        if step is None:
            outside[name] += item.self_seconds
        else:
            seconds[name][position[step]] += item.self_seconds
            tracks.add(item.phase.track)
    chart = Chart(title="Seconds by phase", figure=new_figure(height=300), wide=True)
    chart.about.append(about("time/{phase}"))
    chart.figure.update_layout(barmode="stack", bargap=0.12, yaxis_title_text="seconds")
    # Half a bar and its gap at both ends; each bar spans several steps if there are many.
    step_axis(chart.figure, steps[0], steps[-1], pad=max(0.7, 0.7 * (steps[-1] - steps[0]) / points))
    for name, values in seconds.items():
        if not values.any():
            continue
        x, y = thin(np.array(steps), values, points, peak=False)
        label = name
        if name in parents:
            label = name + REST
        chart.figure.add_bar(
            x=x.astype(np.int32),
            y=y.astype(np.float32),
            name=label,
            marker={"color": colors[name], "line": {"width": 0}},
            customdata=list(map(duration, y.tolist())),
            hovertemplate="%{customdata}",
        )
    chart.figure.update_layout(hovermode="x unified")
    named = [f"{name}: {words}" for name, words in PHASE_WORDS.items() if name in seconds]
    if named:
        chart.notes.append(f"{'; '.join(named)}.")
    if len(steps) > points:
        chart.notes.append(f"Each bar is the mean of {run_length(len(steps), points)} steps.")
    if parents:
        chart.notes.append("rest: time of a phase minus the time of the phases nested in it.")
    if len(tracks) > 1:
        chart.notes.append("Tracks run in parallel, so a bar may be longer than the duration of its step.")
    if outside:
        listed = ", ".join(f"{name} {duration(value)}" for name, value in outside.items())
        chart.notes.append(f"Outside of steps: {listed}.")
    return [chart]


def _gantt(placed: Sequence[Placed], colors: dict[str, str]) -> list[Chart]:
    steps = _steps(placed)[-GANTT_STEPS:]
    inside = [item for item in placed if item.phase.step in steps]
    if not inside:
        return []
    origin = min(item.phase.start for item in inside)
    end = max(item.phase.start + item.phase.seconds for item in inside)
    for item in placed:
        phase = item.phase
        if phase.step is None and phase.start < end and phase.start + phase.seconds > origin:
            inside.append(item)
    keys = sorted({_row(item) for item in inside}, key=_track_order(inside))
    rows = {key: number for number, key in enumerate(keys[:GANTT_ROWS])}
    title = f"Step {steps[0]} by track"
    if len(steps) > 1:
        title = f"Last {len(steps)} steps by track"
    chart = Chart(title=title, figure=new_figure(height=96 + 30 * len(rows)), wide=True)
    chart.about.append(TRACKS)
    if len(keys) > GANTT_ROWS:
        chart.notes.append(f"{len(keys) - GANTT_ROWS} more rows of overlapping phases are not drawn.")
    bars: dict[str, _Bars] = {name: _Bars() for name in colors}
    for item in inside:
        if _row(item) in rows:
            bars[item.phase.name].add(item, origin, rows[_row(item)])
    for name, drawn in bars.items():
        if not drawn.start:
            continue
        chart.figure.add_bar(
            orientation="h",
            base=drawn.start,
            x=drawn.seconds,
            y=drawn.row,
            width=0.78,
            name=name,
            marker={"color": colors[name], "line": {"width": 0}},
            text=[name] * len(drawn.start),
            textposition="inside",
            textangle=0,  # text that does not fit into a bar is omitted rather than rotated
            insidetextanchor="middle",
            textfont={"color": "white"},
            customdata=drawn.words,
            hovertemplate="%{customdata}",
        )
    # Only the first row of a track is labeled; the rows below it are its nested and overlapping phases.
    named = {track: number for (track, _, _), number in reversed(rows.items())}
    chart.figure.update_yaxes(
        tickvals=list(named.values()),
        ticktext=list(named),
        range=[len(rows) - 0.4, -0.6],
        showgrid=False,
        ticks="outside",
        ticklen=6,
        tickcolor="rgba(0,0,0,0)",
    )
    chart.figure.update_xaxes(range=[0, end - origin], title_text="seconds", showgrid=True, gridcolor=GRID)
    chart.figure.update_layout(barmode="overlay", uniformtext={"minsize": 10, "mode": "hide"}, hovermode="closest")
    _mark_steps(chart, inside, steps, origin)
    chart.figure.update_layout(showlegend=False, margin={"t": 24})
    chart.notes.append("Colors as above; numbers above the tracks are steps.")
    chart.notes.append("A bar below a longer one of its track is nested in it or overlaps with it.")
    return [chart]


def _mark_steps(chart: Chart, items: Sequence[Placed], steps: Sequence[int], origin: float) -> None:
    starts: dict[int, float] = {}
    for item in items:
        phase = item.phase
        if phase.step is not None:
            starts[phase.step] = min(phase.start, starts.get(phase.step, phase.start))
    for step in steps:
        _mark_step(chart, starts[step] - origin, str(step))


def _mark_step(chart: Chart, start: float, label: str) -> None:
    """Draws a dotted line with a label above it at the start of a step."""
    chart.figure.add_vline(x=start, line={"color": "rgba(128,128,128,0.7)", "width": 1, "dash": "dot"})
    chart.figure.add_annotation(
        x=start, y=1, yref="paper", yanchor="bottom", xanchor="left", text=label, showarrow=False
    )


@dataclass(slots=True)
class _Bars:
    """Bars of one phase, as parallel lists of start and length in seconds, row, and words for readers."""

    start: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def add(self, item: Placed, origin: float, row: int) -> None:
        phase = item.phase
        self.start.append(round(max(phase.start - origin, 0.0), 4))
        self.seconds.append(round(min(phase.seconds, phase.start + phase.seconds - origin), 4))
        self.row.append(row)
        step = "" if phase.step is None else f"step {phase.step}: "
        self.words.append(step + duration(phase.seconds))


def _row(item: Placed) -> tuple[str, int, int]:
    return item.phase.track, item.lane, item.depth


def _track_order(items: Sequence[Placed]) -> Callable[[tuple[str, int, int]], tuple[int, int, int]]:
    """Returns a key function that sorts chart rows by track; tracks are in the order in which their first phases
    start."""
    order: dict[str, int] = {}
    for item in items:
        order.setdefault(item.phase.track, len(order))
    return lambda row: (order[row[0]], row[1], row[2])
