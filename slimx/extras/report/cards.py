"""Cards of the report and of the live page: main figures of a run, with the steps from which they are computed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from slimx.extras.report.curves import measured, metrics_of
from slimx.extras.report.meanings import About, about, digits, shown
from slimx.observability.tracking.metrics import StepRecord

RECENT_STEPS = 10
"""Number of last steps over which the mean of a figure is computed."""


class Over(StrEnum):
    """Way in which a figure is computed from the steps in which its metric was measured."""

    RECENT = "mean of the last steps"
    NEWEST = "value of the newest step"
    SUM = "sum of all steps"
    HIGHEST = "highest of all steps"


@dataclass(frozen=True, slots=True)
class Figure:
    """Definition of a card."""

    title: str
    metric: str
    """Name of the metric, as a regular expression. A figure over several metrics is the highest of them."""
    over: Over
    if_zero: bool = True
    """False to omit the card if the figure is 0."""


FIGURES = (
    Figure("Reward", "reward/mean", Over.RECENT),
    Figure("Held-out reward", "eval/accuracy", Over.NEWEST),
    Figure("Loss, supervised", "loss/sft", Over.RECENT),
    Figure("Loss of the reward model", "preference/loss", Over.RECENT),
    Figure("Log-prob gap (train-inference mismatch)", "gap/mean", Over.RECENT),
    Figure("Tokens with an unexplained gap", "gap/tokens_unexplained", Over.SUM),
    Figure("Staleness (off-policy lag), versions", "staleness/max", Over.HIGHEST),
    Figure("Dropped groups", "dropped/total", Over.SUM),
    Figure("Tokens per second", "perf/tokens_per_second", Over.RECENT),
    Figure("Time per step", "time/step", Over.RECENT),
    Figure("Trainer memory, MiB", r"memory/.+_peak_mib", Over.HIGHEST),
    Figure("Skipped optimizer steps", "optim/skipped", Over.SUM, if_zero=False),
    Figure("Optimizer steps without a gradient", "optim/zero_gradient", Over.SUM, if_zero=False),
)

SUMMARIZED = re.compile(
    r"steps|sampled reward, .*|held-out (reward|accuracy) (before|after)|log-prob gap trainer/engine, .*"
    r"|tokens with a gap above 1e-5 .*|loss, last step|trainer memory at its peak, .*|seconds of training"
    r"|optimizer steps (skipped|without a gradient)"
)
"""Labels of a run's summary whose figures are on a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Figure with its explanation, as text."""

    title: str
    value: str
    scope: str
    """Steps from which the value is computed, such as `mean of the last 10 steps`."""
    more: list[str]
    """Values of single steps, such as `step 1: 0.25`."""
    about: About | None
    """Explanation; None for an entry of the summary that slimx did not write."""

    def to_json(self) -> dict[str, Any]:
        """Returns the card as the live page draws it."""
        return asdict(self) | {"about": [] if self.about is None else [self.about.to_json()]}


def cards(records: Sequence[StepRecord]) -> list[Card]:
    """Returns the cards of the figures that `records`, the steps of a run, contain."""
    names = metrics_of(records)
    out = []
    for figure in FIGURES:
        found = []
        for name in filter(re.compile(figure.metric).fullmatch, sorted(names)):
            found.append((name, *measured(records, name)))
        if found:
            name, steps, values = max(found, key=lambda item: np.max(item[2], initial=-math.inf))
            if figure.if_zero or values.any():
                out.append(_card(figure, name, steps.tolist(), values.tolist()))
    return out


def other_cards(summary: Mapping[str, object], *, all_of_them: bool) -> list[Card]:
    """Returns a card for each entry of a run's summary that no figure of `FIGURES` replaces, or for all of its
    entries."""
    out = []
    for label, value in summary.items():
        if all_of_them or not SUMMARIZED.fullmatch(label):
            text = digits(value) if isinstance(value, (int, float)) else str(value)
            out.append(Card(title=label, value=text, scope="", more=[], about=None))
    return out


def _card(figure: Figure, metric: str, steps: Sequence[int], values: Sequence[float]) -> Card:
    first = f"step {steps[0]}: {shown(metric, values[0])}"
    last = f"step {steps[-1]}: {shown(metric, values[-1])}"
    more = [last]
    if figure.over is Over.NEWEST:
        value = values[-1]
        scope = f"step {steps[-1]}"
        more = [first]
    elif figure.over is Over.RECENT:
        value = mean(values[-RECENT_STEPS:])
        scope = f"mean of the last {min(RECENT_STEPS, len(steps))} steps"
        more = [first, last]
    elif figure.over is Over.SUM:
        value = sum(filter(math.isfinite, values))
        scope = f"sum of steps {steps[0]} to {steps[-1]}"
    else:
        value = max(filter(math.isfinite, values), default=math.nan)
        scope = f"highest of steps {steps[0]} to {steps[-1]}"
    if len(steps) == 1:
        scope = f"step {steps[0]}"
        more = []
    return Card(title=figure.title, value=shown(metric, value), scope=scope, more=more, about=about(metric))


def mean(values: Sequence[float] | np.ndarray) -> float:
    """Returns the mean of the finite values; NaN if there are none."""
    finite = np.array(values)[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan
