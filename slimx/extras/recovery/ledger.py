"""The batches trained since the newest checkpoint, by which new trainers reach the state of the lost ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from slimx.data.batch import MicroBatch, TrainBatch
from slimx.errors import SlimxError

CLOSE = 1e-2
"""Relative difference that a changed order of summation may cause; in bf16 a hundred times that of fp32."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A trained step: the trainers' input and the metrics that they returned."""

    step: int
    """Number of steps before it."""
    version: int
    """Weight version of the engines during the step."""
    updates: list[TrainBatch]
    metrics: dict[str, float]
    """Metrics returned by the trainers."""

    @property
    def nbytes(self) -> int:
        """Size of its arrays, in bytes."""
        return sum(_nbytes(batch) for update in self.updates for shard in update.shards for batch in shard)


@dataclass(frozen=True, slots=True)
class Base:
    """A state from which new trainers can start."""

    step: int = 0
    """Number of steps done."""
    checkpoint: Path | None = None
    """Checkpoint directory; None: the run's initial weights, with which trainers start."""
    same_layout: bool = True
    """True if the checkpoint has the run's parallel sizes."""


class Ledger:
    """The newest base and the steps since then, in the driver's memory: at most the steps between two checkpoints and
    those during the second one's write."""

    def __init__(self) -> None:
        self.base = Base()
        self.steps: dict[int, TrainedStep] = {}
        """Trained steps, by the number of steps before each."""

    def trained(self, step: TrainedStep) -> None:
        """Records a step that the trainers have done."""
        self.steps[step.step] = step

    def rebase(self, base: Base) -> None:
        """Sets `base` and drops the steps before it."""
        self.base = base
        self.steps = {index: step for index, step in self.steps.items() if index >= base.step}

    @property
    def nbytes(self) -> int:
        """Size of the recorded batches, in bytes."""
        return sum(step.nbytes for step in self.steps.values())


def check_same(step: int, recorded: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Raises SlimxError naming the first metric of step `step` (from 1) that differs in any bit from the recorded one.
    NaN equals NaN."""
    for name in sorted({*recorded, *again}):
        before = recorded.get(name)
        now = again.get(name)
        if before is None or now is None or not _same(before, now):
            hint = "; kernels without a fixed order of summation cause this: set recovery.trainers=0 with them"
            raise _differs(step, name, before, now, hint)


def check_close(step: int, recorded: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Raises SlimxError naming a metric of step `step` (from 1) that differs by more than fewer ranks' order of
    summation explains: a norm or loss off by more than `CLOSE` times the gradient norm (at least 1)."""
    bound = CLOSE * max(1.0, abs(recorded.get("optim/grad_norm", 1.0)))
    for name in ("optim/grad_norm", "loss/policy"):
        if name not in recorded:
            continue
        before = recorded[name]
        now = again.get(name, math.nan)
        if not (_same(before, now) or abs(before - now) <= bound):
            raise _differs(step, name, before, now, ", with its parallel sizes")


def _differs(step: int, name: str, before: float | None, now: float | None, hint: str) -> SlimxError:
    return SlimxError(
        f"new trainers trained step {step} on the batch recorded by the driver, but {name} is {now} instead of "
        f"{before}: their state differs from the run's, so the run ends; the same command resumes from the newest "
        f"checkpoint{hint}",
        code="recovery.differs",
        about=name,
    )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _nbytes(batch: MicroBatch) -> int:
    values: Iterable[object] = (getattr(batch, field.name) for field in fields(batch))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))
