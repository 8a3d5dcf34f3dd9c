"""Figures of benchmarks/publish.py, and the table made of them."""

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
"""Stage -> what the table calls it. `pack` overlaps with `transfer` and `verify`, so that they exceed the total."""
GOALS = {"pack": 5.0, "total": 2.0}
"""Ratio of the per-tensor way's time to slimx's, at least."""
PER_TENSOR = "per tensor"


@dataclass(slots=True)
class PublishFigures:
    """Seconds by way, stage and round; round i of all ways was measured one right after the other."""

    rounds: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    nbytes: int = 0
    tensors: int = 0
    """In Hugging Face names."""
    links: list[Links] = field(default_factory=list)
    """This machine's rates, right before each round."""
    buckets: dict[str, int] = field(default_factory=dict)
    """By slimx's way."""
    others: float = 0.0
    """Cores that processes of others used on average meanwhile."""

    def seconds(self, way: str, stage: str) -> np.ndarray:
        """By round."""
        return np.array([seconds[stage] for seconds in self.rounds[way]])

    def ratios(self, way: str, stage: str) -> np.ndarray:
        """Per tensor / this way, by round."""
        return self.seconds(PER_TENSOR, stage) / self.seconds(way, stage)


def describe(figures: PublishFigures) -> str:
    """The table of medians, and under it the ratios with their spread."""
    ways = list(figures.rounds)
    lines = [f"{'stage':<24}" + "".join(f"{way:>14}" for way in ways)]
    for stage, name in STAGES.items():
        cells = (f"{np.median(figures.seconds(way, stage)):>12.3f} s" for way in ways)
        lines.append(f"{name:<24}" + "".join(cells))
    lines += [f"medians of {len(figures.rounds[PER_TENSOR])} rounds; {figures.nbytes / 1e9:.2f} GB", ""]
    for way in ways:
        if way != PER_TENSOR:
            lines += [_ratio(figures, way, stage, goal) for stage, goal in GOALS.items()]
    return "\n".join(lines)


def _ratio(figures: PublishFigures, way: str, stage: str, goal: float) -> str:
    ratios = figures.ratios(way, stage)
    middle = float(np.median(ratios))
    return (
        f"{PER_TENSOR} / {way}, {STAGES[stage]}: {middle:.2f} (range {ratios.min():.2f} to {ratios.max():.2f}), "
        f"{'meets' if middle >= goal else 'misses'} the goal of {goal:g}"
    )


def describe_model(figures: PublishFigures, own: LinkTrial, rehearsed: LinkTrial) -> str:
    """The rates that the link model predicts from, and how far it misses."""
    pack, check, copy, verify = (
        float(np.median([getattr(links, rate) for links in figures.links])) / 1e9
        for rate in ("pack", "check", "copy", "verify")
    )
    call = float(np.median([links.call for links in figures.links])) * 1e6
    return (
        f"rates of small pieces, one thread, GB/s: pack {pack:.1f}, check of staged bytes {check:.1f}, copy "
        f"{copy:.1f}, verify of held bytes {verify:.1f}; {call:.0f} us per call\n"
        f"link model: {own.off:+.0%} for slimx local (goal: within {TOLERANCE:.0%}), {rehearsed.off:+.0%} in the test "
        "of `slimx plan --predict`"
    )


def describe_predictions(rows: Sequence[tuple[str, str]] | None) -> str:
    """Predictions of other publications, labelled; None: the model does not hold here."""
    if rows is None:
        return "predictions of other publications: not shown, the model misses by more than that here"
    return "\n".join(["predicted by the link model, not measured:", *(f"  {what}: {told}" for what, told in rows)])
