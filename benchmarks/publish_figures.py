"""Figures of benchmarks/publish.py, and the table that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slimx.extras.planner.links.model import TOLERANCE, Links, LinkTrial

STAGES = {
    "pack": "gather, convert, pack",
    "transfer": "transfer",
    "verify": "verify",
    "load": "load",
    "total": "total",
}
"""Stage -> its name in the table. `pack` overlaps with `transfer` and `verify`, so their sum exceeds the total."""
GOALS = {"pack": 5.0, "total": 2.0}
"""Smallest accepted ratio of the per-tensor method's time to slimx's, by stage."""
PER_TENSOR = "per tensor"


@dataclass(slots=True)
class PublishFigures:
    """Seconds by method, stage and round. Round i of all methods was measured one right after the other."""

    rounds: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    nbytes: int = 0
    tensors: int = 0
    """Number of tensors under their Hugging Face names."""
    links: list[Links] = field(default_factory=list)
    """This machine's rates, measured right before each round."""
    buckets: dict[str, int] = field(default_factory=dict)
    """Number of buckets by method of slimx."""
    others: float = 0.0
    """Average number of cores used by other processes meanwhile."""

    def seconds(self, method: str, stage: str) -> np.ndarray:
        """Returns the seconds of a stage by round."""
        return np.array([seconds[stage] for seconds in self.rounds[method]])

    def ratios(self, method: str, stage: str) -> np.ndarray:
        """Returns the per-tensor method's seconds over this method's, by round."""
        return self.seconds(PER_TENSOR, stage) / self.seconds(method, stage)


def describe(figures: PublishFigures) -> str:
    """Returns the table of medians, and below it the ratios with their spread."""
    methods = list(figures.rounds)
    lines = [f"{'stage':<24}" + "".join(f"{method:>14}" for method in methods)]
    for stage, name in STAGES.items():
        cells = (f"{np.median(figures.seconds(method, stage)):>12.3f} s" for method in methods)
        lines.append(f"{name:<24}" + "".join(cells))
    lines += [f"medians of {len(figures.rounds[PER_TENSOR])} rounds; {figures.nbytes / 1e9:.2f} GB", ""]
    for method in methods:
        if method != PER_TENSOR:
            lines += [_ratio(figures, method, stage, goal) for stage, goal in GOALS.items()]
    return "\n".join(lines)


def _ratio(figures: PublishFigures, method: str, stage: str, goal: float) -> str:
    ratios = figures.ratios(method, stage)
    middle = float(np.median(ratios))
    return (
        f"{PER_TENSOR} / {method}, {STAGES[stage]}: {middle:.2f} (range {ratios.min():.2f} to {ratios.max():.2f}), "
        f"{'meets' if middle >= goal else 'misses'} the goal of {goal:g}"
    )


def describe_model(figures: PublishFigures, local: LinkTrial, rehearsed: LinkTrial) -> str:
    """Returns the rates from which the link model predicts, and the errors of its predictions."""
    pack, check, copy, verify = (
        float(np.median([getattr(links, rate) for links in figures.links])) / 1e9
        for rate in ("pack", "check", "copy", "verify")
    )
    call = float(np.median([links.call for links in figures.links])) * 1e6
    return (
        f"rates of small pieces, one thread, GB/s: pack {pack:.1f}, check of staged bytes {check:.1f}, copy "
        f"{copy:.1f}, verify of held bytes {verify:.1f}; {call:.0f} us per call\n"
        f"link model: {local.off:+.0%} for slimx local (goal: within {TOLERANCE:.0%}), {rehearsed.off:+.0%} in the "
        "test of `slimx plan --predict`"
    )


def describe_predictions(rows: Sequence[tuple[str, str]] | None) -> str:
    """Returns predictions of other publications, labelled as such; None: the model is wrong on this machine."""
    if rows is None:
        return "predictions of other publications: not shown, the model misses by more than that here"
    return "\n".join(
        ["predicted by the link model, not measured:", *(f"  {what}: {prediction}" for what, prediction in rows)]
    )
