"""Figures of benchmarks/loop.py, and the table that shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

GOAL = 1.15
"""Largest accepted ratio of slimx's step to the sum of its parts."""
BESIDE = {"generate": "engine", "train": "trainer", "publish": "publication"}
"""Phase of slimx's loop -> the bare part that does the same work."""


@dataclass(slots=True)
class SlimxStep:
    """A step of slimx's loop, in seconds."""

    seconds: float
    """The whole step, from the end of the previous one."""
    phases: dict[str, float]
    """Seconds by phase of the loop, then `record`, then `rest`, the time outside all phases. They sum to `seconds`."""
    stages: dict[str, float]
    """Seconds by stage of the publication."""


@dataclass(slots=True)
class BareRound:
    """One round of the bare parts, one after the other, in seconds."""

    engine: float
    trainer: float
    publication: float
    stages: dict[str, float]
    """Seconds by stage of the publication."""

    @property
    def seconds(self) -> float:
        return self.engine + self.trainer + self.publication


@dataclass(slots=True)
class Figures:
    """All figures of one run; slimx[i] and bare[i] are pair i, measured one right after the other."""

    slimx: list[SlimxStep] = field(default_factory=list)
    bare: list[BareRound] = field(default_factory=list)
    rollouts: int = 0
    """Number of rollouts per step."""
    sampled: int = 0
    """Sampled tokens per step."""
    trained: int = 0
    """Positions per step for which the trainers compute a forward pass."""
    mib: float = 0.0
    """Size of one publication in MiB."""
    others: float = 0.0
    """Average number of cores used by other processes meanwhile."""

    def ratios(self) -> np.ndarray:
        """Returns slimx's seconds over the sum of the parts, by pair."""
        return np.array([a.seconds / b.seconds for a, b in zip(self.slimx, self.bare, strict=True)])

    def median_step(self) -> float:
        """Returns the median seconds of slimx's step."""
        return float(np.median([step.seconds for step in self.slimx]))


def describe(figures: Figures) -> str:
    """Returns the table of means, and below it the ratio with its spread."""
    step, total = figures.slimx, fmean(one.seconds for one in figures.slimx)
    lines = [f"{'phase':<12}{'slimx s':>9}{'share':>9}{'bare s':>10}  bare part"]

    def row(name: str, seconds: float, bare: float | None = None, part: str = "") -> None:
        beside = "" if bare is None else f"{bare:>10.3f}  {part}"
        lines.append(f"{name:<12}{seconds:>9.3f}{seconds / total:>9.1%}{beside}".rstrip())

    for phase in step[0].phases:
        part = BESIDE.get(phase, "")
        bare = fmean(getattr(one, part) for one in figures.bare) if part else None
        row(phase, fmean(one.phases[phase] for one in step), bare, part)
        if phase == "publish":
            for stage in step[0].stages:
                row(f"  {stage}", *(fmean(one.stages[stage] for one in side) for side in (step, figures.bare)))
    row("step", total, fmean(one.seconds for one in figures.bare), "sum of parts")

    ratios = figures.ratios()
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    lines += [
        "means over the pairs; record: its files and the table; rest: in no phase",
        "",
        f"slimx / sum of parts: {middle:.3f}, the median of {len(ratios)} pairs; quartiles {low:.3f} to {high:.3f}, "
        f"range {ratios.min():.3f} to {ratios.max():.3f}",
        f"overhead: {middle - 1:.1%}, {'within' if middle <= GOAL else 'beyond'} the goal of {GOAL - 1:.0%}",
        "",
        f"slimx's steps: {' '.join(f'{one.seconds:.2f}' for one in step)} s",
        f"sums of parts: {' '.join(f'{one.seconds:.2f}' for one in figures.bare)} s",
        f"in each: {figures.rollouts} rollouts, {figures.sampled:,} tokens sampled, {figures.trained:,} positions "
        f"trained on, {figures.mib:.1f} MiB published",
    ]
    return "\n".join(lines)
