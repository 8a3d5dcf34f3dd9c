"""Charts of metrics over steps, as data: which metrics a chart contains, under which names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Series:
    """Metric that a panel draws as a curve."""

    key: str
    label: str
    running_mean: bool = False
    """True to draw the metric faintly, overlaid with its running mean."""
    sparse: bool = False
    """True for a metric that is measured only at some steps and is therefore drawn with markers."""
    alone: str = ""
    """Title of a chart that contains only this metric; "": the panel's title, followed by the label."""


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

    def title_of(self, present: Sequence[Series]) -> str:
        """Returns the title of a chart that contains only `present`, some of the panel's metrics."""
        if len(present) > 1 or len(self.series) == 1:
            return self.title
        return present[0].alone or f"{self.title}: {present[0].label}"


PANELS = (
    Panel(
        "Reward and held-out reward",
        Series("reward/mean", "sampled reward", running_mean=True, alone="Reward"),
        Series("eval/accuracy", "held-out reward", sparse=True, alone="Held-out reward"),
    ),
    Panel(
        "Fraction of groups without signal and of truncated responses",
        Series("reward/groups_without_signal", "groups without signal", alone="Fraction of groups without signal"),
        Series("response/truncated", "truncated", alone="Fraction of truncated responses"),
    ),
    Panel(
        "Response length, tokens",
        Series("response/mean_tokens", "mean"),
        Series("response/max_tokens", "longest"),
        Series("response/passed_mean_tokens", "correct answers"),
        Series("response/failed_mean_tokens", "wrong answers"),
    ),
    Panel("Entropy of the policy, nats", Series("policy/entropy", "entropy")),
    Panel(
        "Loss",
        Series("loss/policy", "policy", alone="Loss of the policy"),
        Series("loss/sft", "supervised", alone="Loss, supervised"),
        Series("value/loss", "critic", alone="Loss of the critic"),
    ),
    Panel(
        "Fraction of clipped tokens",
        Series("loss/clip_fraction", "policy", alone="Fraction of clipped tokens"),
        Series("value/clip_fraction", "critic"),
    ),
    Panel("KL divergence from the reference", Series("kl/reference", "KL")),
    Panel(
        "Gradient norm",
        Series("optim/grad_norm", "policy", alone="Gradient norm"),
        Series("critic/grad_norm", "critic"),
    ),
    Panel("Log-prob gap (train-inference mismatch)", Series("gap/mean", "mean"), Series("gap/max", "max"), log=True),
    Panel(
        "Tokens with a gap above 1e-5",
        Series("gap/tokens_above_1e-5", "all"),
        Series("gap/tokens_other_routes", "routed to other experts"),
    ),
    Panel("Learning rate", Series("optim/lr", "policy", alone="Learning rate"), Series("critic/lr", "critic")),
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


def matching(names: Collection[str], pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Returns those of `names` that match `pattern`, in alphabetical order, each with the text that the pattern's group
    matched."""
    out = []
    for name in sorted(names):
        match = pattern.fullmatch(name)
        if match is not None:
            out.append((name, match[1]))
    return out


def panels_of_one(names: Collection[str]) -> list[Panel]:
    """Returns a panel for each of the metrics `names` that the charts of a run contain, in the order of these
    charts."""
    out = []
    for panel in PANELS:
        for series in panel.series:
            if series.key in names:
                out.append(Panel(panel.title_of([series]), series, log=panel.log, thousands=panel.thousands))
    for title, pattern in (*FAMILIES, ("Logged by a hook", LOGGED)):
        for name, label in matching(names, pattern):
            out.append(Panel(f"{title}: {label}", Series(name, label, sparse=is_sparse(name))))
    return out


def is_sparse(name: str) -> bool:
    """Returns True for a metric of held-out prompts, which is not measured at every step."""
    return "eval/" in name
