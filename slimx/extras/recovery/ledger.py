"""The batches that were trained since the newest checkpoint: with it they make the trainers' present state again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from slimx.data.batch import MicroBatch, TrainBatch
from slimx.errors import SlimxError

CLOSE = 1e-2
"""Difference that the order of a sum may make, relative; in bf16 a hundred times that in fp32."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step as the trainers were given it, and what came of it."""

    step: int
    """Steps done before it."""
    version: int
    """Weight version of the engines when it was trained."""
    updates: list[TrainBatch]
    metrics: dict[str, float]
    """Metrics that the trainers returned."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(_nbytes(batch) for update in self.updates for shard in update.shards for batch in shard)


@dataclass(frozen=True, slots=True)
class Base:
    """A state that new trainers can begin from."""

    step: int = 0
    """Steps done."""
    checkpoint: Path | None = None
    """Directory that holds it; None: the run's initial weights, with which trainers start."""
    same_layout: bool = True
    """True if the checkpoint was written under the run's parallel sizes."""


class Ledger:
    """The newest base and the steps since then, in driver memory; at most as many as lie between two checkpoints and
    the writing of the second."""

    def __init__(self) -> None:
        self.base = Base()
        self.steps: dict[int, TrainedStep] = {}
        """By the number of steps before it."""

    def trained(self, step: TrainedStep) -> None:
        """Keep a step that the trainers have done."""
        self.steps[step.step] = step

    def rebase(self, base: Base) -> None:
        """Begin from `base` from now on; steps before it are not needed any more."""
        self.base = base
        self.steps = {number: step for number, step in self.steps.items() if number >= base.step}

    @property
    def nbytes(self) -> int:
        """Bytes of the batches that are kept."""
        return sum(step.nbytes for step in self.steps.values())


def check_same(step: int, recorded: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Raise SlimxError naming the first metric of step `step` (from 1) that is not to the last bit what was recorded.
    NaN equals NaN."""
    for name in sorted({*recorded, *again}):
        before, now = recorded.get(name), again.get(name)
        if before is None or now is None or not _same(before, now):
            hint = "; kernels that add in another order each time do this: leave recovery.trainers at 0 with them"
            raise _differs(step, name, before, now, hint)


def check_close(step: int, recorded: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Raise SlimxError naming what of step `step` (from 1) is not what was recorded, but for the order in which fewer
    ranks add: a norm or a loss that differs by more than `CLOSE` of the norm of the gradients, or of 1."""
    bound = CLOSE * max(1.0, abs(recorded.get("optim/grad_norm", 1.0)))
    for name in ("optim/grad_norm", "loss/policy"):
        if name not in recorded:
            continue
        before, now = recorded[name], again.get(name, math.nan)
        if not (_same(before, now) or abs(before - now) <= bound):
            raise _differs(step, name, before, now, ", under the sizes that it says")


def _differs(step: int, name: str, before: float | None, now: float | None, hint: str) -> SlimxError:
    return SlimxError(
        f"new trainers trained step {step} on the batch that the driver kept, but {name} is {now} and was {before}: "
        "they are not in the state that the run had, so it does not go on with them; the same command goes on from the "
        f"newest checkpoint{hint}",
        code="recovery.differs",
        about=name,
    )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _nbytes(batch: MicroBatch) -> int:
    values: Iterable[object] = (getattr(batch, field.name) for field in fields(batch))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))
