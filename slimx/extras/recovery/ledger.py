"""Record of the batches that were trained on since the newest checkpoint. Training on these batches again restores the
state of lost trainers in new ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slimx.data.batch import MicroBatch, TrainBatch, TrainingRow
from slimx.data.lazy import held
from slimx.data.records import Trajectory
from slimx.data.sampling_support import Support
from slimx.errors import SlimxError

CLOSE = 1e-2
"""Maximum relative difference in a metric that a changed order of summation can explain. In bf16 such a difference is a
hundred times that in fp32."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Record of a completed training step: the input of the trainers, and the metrics that they returned."""

    step: int
    """Number of steps completed before this one."""
    version: int
    """Version of the engines' weights during the step."""
    updates: list[TrainBatch]
    metrics: dict[str, float]
    """Metrics that the trainers returned."""

    @property
    def nbytes(self) -> int:
        """Size of the arrays in the step's batches, in bytes, without those in Ray's object store."""
        return _nbytes([update.shards for update in self.updates])


@dataclass(frozen=True, slots=True)
class Base:
    """State from which new trainers can start."""

    step: int = 0
    """Number of steps that the state includes."""
    checkpoint: Path | None = None
    """Checkpoint directory with the state; None: the initial weights with which trainers start."""
    same_layout: bool = True
    """True if the checkpoint was written with the run's current parallel sizes."""


class Ledger:
    """Record, in the driver's memory, of the newest state from which trainers can start, and of the steps since then.
    It contains at most the steps between two checkpoints, and those completed while the second one is written."""

    def __init__(self) -> None:
        self.base = Base()
        self.steps: dict[int, TrainedStep] = {}
        """Completed training steps, by the number of steps before each."""

    def trained(self, step: TrainedStep) -> None:
        """Records a training step that the trainers have completed."""
        self.steps[step.step] = step

    def rebase(self, base: Base) -> None:
        """Makes `base` the newest state, and drops the steps that `base` includes."""
        self.base = base
        self.steps = {index: step for index, step in self.steps.items() if index >= base.step}

    @property
    def nbytes(self) -> int:
        """Size of the recorded batches, in bytes."""
        return sum(step.nbytes for step in self.steps.values())


def check_same(step: int, recorded: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Raises SlimxError naming the first metric of step `step` (counted from 1) that differs in any bit between
    `recorded`, the metrics when the step was first trained, and `again`, those of its repetition. NaN equals NaN."""
    for name in sorted({*recorded, *again}):
        before = recorded.get(name)
        now = again.get(name)
        if before is None or now is None or not _same(before, now):
            hint = ", and set recovery.trainers=0 if kernels do not add numbers in a fixed order"
            raise _differs(step, name, before, now, hint)


def check_close(step: int, recorded: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Raises SlimxError naming a metric of step `step` (counted from 1) that changed too much when fewer ranks repeated
    the step: the gradient norm or the loss differs by more than `CLOSE` times the recorded gradient norm (at least
    `CLOSE`), which a changed order of summation cannot explain. `recorded`: metrics when the step was first trained;
    `again`: metrics of its repetition."""
    bound = CLOSE * max(1.0, abs(recorded.get("optim/grad_norm", 1.0)))
    for name in ("optim/grad_norm", "loss/policy"):
        if name not in recorded:
            continue
        before = recorded[name]
        now = again.get(name, math.nan)
        if not (_same(before, now) or abs(before - now) <= bound):
            raise _differs(step, name, before, now, " with the original parallel sizes")


def _differs(step: int, name: str, before: float | None, now: float | None, hint: str) -> SlimxError:
    return SlimxError(
        f"repeating step {step} after the loss of trainers gave {name} {now} instead of {before}, so the trainers' "
        f"state was not restored exactly; run the same command again to resume from the newest checkpoint{hint}",
        code="recovery.differs",
        about=name,
    )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _nbytes(value: object) -> int:
    """Returns the size of the arrays in a record, or in nested lists of records, without making any column."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    if isinstance(value, MicroBatch | TrainingRow | Trajectory | Support):
        return sum(_nbytes(part) for name, part in held(value).items() if name != "example")  # one of the members
    return 0
