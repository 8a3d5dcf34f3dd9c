"""Shared parts of a report's charts: the figure with its title and notes, its style, and the thinning of long
curves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go

from slimx.extras.report.meanings import About

# Distinguishable on white and on near-black backgrounds.
PALETTE = ("#4a86cf", "#dd8a33", "#3f9f7f", "#b05c9f", "#c8574f", "#8f8340", "#3aa3b4", "#8a78c9", "#9a6b4f", "#7c8793")
PHASES = {
    "generate": "#4a86cf",
    "train": "#dd8a33",
    "publish": "#3f9f7f",
    "eval": "#b05c9f",
    "save": "#c8574f",
    "save_wait": "#e0a199",
    "prepare": "#8f8340",
    "values": "#3aa3b4",
    "sleep": "#8a78c9",
    "wake": "#b7a9e6",
    "probe": "#9a6b4f",
    "export": "#d3b13f",
    "start": "#7c8793",
    "restart": "#d65f9b",
    "failed restart": "#7e2f2f",
    "checkpoint": "#c98fbd",
    "logprobs": "#5f6bd0",
    "restore": "#8fbf9f",
    "step": "#b9c0c7",
}
"""Color of each phase, the same in the charts of all runs."""
OTHERS = ("#6f9fd8", "#a3c34f", "#cf7d5a", "#4fb0a0", "#a86fd6", "#d4a94e", "#5b8a72", "#e08fa8")
"""Colors for phases that are not in PHASES."""
GRID = "rgba(128,128,128,0.22)"


class PhaseColors:
    """Assignment of colors to phases, the same in all charts of a page: a phase listed in PHASES has the color given
    there; other phases get colors from OTHERS, in order of first use."""

    def __init__(self) -> None:
        self._others: dict[str, str] = {}

    def of(self, name: str) -> str:
        if name in PHASES:
            return PHASES[name]
        return self._others.setdefault(name, OTHERS[len(self._others) % len(OTHERS)])


@dataclass(kw_only=True, slots=True)
class Chart:
    """Figure with its title and notes."""

    title: str
    figure: go.Figure
    notes: list[str] = field(default_factory=list)
    """Remarks about what the figure does not show: averaging, non-finite values, omissions."""
    about: list[About] = field(default_factory=list)
    """Explanations of the metrics in the figure, in the order of the legend."""
    wide: bool = False


def new_figure(*, height: int) -> go.Figure:
    """Returns an empty figure of `height` pixels. The page's style sheet sets the color of its text for light and dark
    mode."""
    small = {"font": {"size": 12}}
    return go.Figure(
        layout={
            "template": go.layout.Template(),  # plotly's default template is large and suits light mode only
            "height": height,
            "margin": {"l": 56, "r": 18, "t": 10, "b": 40},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12},
            "colorway": PALETTE,
            "hoverlabel": {"bgcolor": "#20262e", "bordercolor": "#20262e", "font": {"color": "#f2f4f6"}},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
            "xaxis": {
                "showgrid": False,
                "zeroline": False,
                "ticks": "outside",
                "tickcolor": GRID,
                "automargin": True,
                "title": small,
            },
            "yaxis": {"gridcolor": GRID, "zeroline": False, "automargin": True, "exponentformat": "e", "title": small},
        }
    )


TICKS = 6
"""Number of intervals between ticks on an axis of steps, at most."""


def step_axis(figure: go.Figure, first: int, last: int, pad: float) -> None:
    """Gives a figure an x axis of steps with a tick at the last step. `pad`: space at both ends, in steps, such as half
    the width of a bar.

    plotly.js chooses round ticks and omits the last label if it has no space, so that a reader cannot tell where a run
    ends. The page's script lets plotly.js choose the ticks again when a reader zooms in."""
    figure.update_xaxes(
        title_text="step", tickvals=step_ticks(first, last), range=[first - pad, last + pad], separatethousands=True
    )


def step_ticks(first: int, last: int) -> list[int]:
    """Returns the steps that have a tick: round numbers from `first` on, and `last`."""
    width = 1
    for factor in itertools.cycle((2, 2.5, 2)):  # 1, 2, 5, 10, 20, ...
        if (last - first) / width <= TICKS:
            break
        width = round(width * factor)
    # A round number close to the last step would overlap with it.
    ticks = [step for step in range(-(-first // width) * width, last, width) if last - step > 0.6 * width]
    return [*ticks, last]


def thin(steps: np.ndarray, values: np.ndarray, points: int, peak: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `points` points of a curve. Each combines consecutive steps: x is the last of them, y the mean of
    their finite values, or the maximum if `peak` is True."""
    if values.size <= points:
        return steps, values
    edges = np.arange(points + 1) * values.size // points
    finite = np.isfinite(values)
    count = np.add.reduceat(finite.astype(np.int64), edges[:-1])
    if peak:
        y = np.maximum.reduceat(np.where(finite, values, -np.inf), edges[:-1])
    else:
        y = np.add.reduceat(np.where(finite, values, 0.0), edges[:-1]) / np.maximum(count, 1)
    return steps[edges[1:] - 1], np.where(count > 0, y, np.nan)


def run_length(size: int, points: int) -> str:
    """Describes how many of `size` values `thin` combines into each of `points` points, such as `3 to 4`."""
    low = size // points
    high = -(-size // points)
    return f"{low}" if low == high else f"{low} to {high}"
