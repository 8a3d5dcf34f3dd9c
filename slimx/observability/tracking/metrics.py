"""The numbers of one step: flat `section/name` keys, one record per step, its strict-JSON form, and the count of steps
of which a policy learned nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimx.errors import SlimxError

STEPS_WITHOUT_SIGNAL = "optim/steps_without_signal"
"""Metric that counts steps in a row without a signal."""
GROUPS_WITHOUT_SIGNAL, GRADIENT_NORM = "reward/groups_without_signal", "optim/grad_norm"


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Names nested metrics by their path: `{"loss": {"policy": 0.1}}` becomes `{"loss/policy": 0.1}`.

    A leaf is a number, a boolean, or a one-element array or tensor (read with `.item()`, which waits for its device).
    A flat mapping comes back unchanged. Raises SlimxError for any other leaf and for a name given twice.
    """
    flat: dict[str, float] = {}
    _collect("", metrics, flat)
    return flat


def _collect(prefix: str, metrics: Mapping[str, Any], flat: dict[str, float]) -> None:
    for key, value in metrics.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            _collect(name, value, flat)
            continue
        if name in flat:
            raise SlimxError(
                f"metric {name} is given twice in one step; rename one of the two",
                code="metrics.twice",
                about=name,
            )
        flat[name] = as_number(name, value)


def as_number(name: str, value: Any) -> float:
    """A metric's value as a float, NaN and infinities included. Raises SlimxError for what is not one number."""
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:  # torch raises the first, numpy the second
            raise SlimxError(
                f"metric {name} holds several numbers; reduce it to one before logging",
                code="metrics.number",
                about=name,
            ) from error
    if not isinstance(value, (int, float)):
        raise SlimxError(
            f"metric {name} is {value!r}, not a number; leave it out of the step or log a number",
            code="metrics.number",
            about=name,
        )
    return float(value)


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """The measurements of one step.

    In JSON a number that is not finite is null under `metrics`, and `nonfinite` (there only then) says which it was:
    `{"step": 3, "version": 2, "time": 1.7e9, "metrics": {"loss/policy": null}, "nonfinite": {"loss/policy": "nan"}}`.
    """

    step: int
    """Step of the loop, >= 0."""
    version: int | None
    """Weight version in force at the step; None where the caller has none, as in supervised fine-tuning."""
    time: float
    """When the step was logged, unix seconds."""
    metrics: dict[str, float]
    """`section/name` -> value; may hold NaN and infinities."""

    def __post_init__(self) -> None:
        if self.step < 0:
            raise SlimxError(
                f"a step record has step {self.step}; steps start at 0",
            )

    def to_json(self) -> dict[str, Any]:
        """The record as strict JSON values, see the class."""
        record: dict[str, Any] = {
            "step": self.step,
            "version": self.version,
            "time": self.time,
            "metrics": {key: value if math.isfinite(value) else None for key, value in self.metrics.items()},
        }
        if bad := {key: str(value) for key, value in self.metrics.items() if not math.isfinite(value)}:
            record["nonfinite"] = bad
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepRecord:
        """The inverse of `to_json`. Raises KeyError, TypeError, ValueError or SlimxError for anything else."""
        nonfinite = record.get("nonfinite", {})
        metrics = {key: float(nonfinite[key] if value is None else value) for key, value in record["metrics"].items()}
        return cls(step=int(record["step"]), version=record["version"], time=float(record["time"]), metrics=metrics)


class Signal:
    """Counts the steps in a row of which a trained policy learned nothing: all rollouts of a group earned the same, or
    the gradient was 0. A process counts from 0."""

    def __init__(self, compared: Mapping[str, bool]):
        """`compared`: by the prefix of each policy's metrics, whether its advantages compare rollouts of a group and
        nothing else gives them."""
        self._compared, self._steps = compared, dict.fromkeys(compared, 0)

    def counted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Counts a step by its metrics; returns the counts of all policies as metrics."""
        for prefix, compared in self._compared.items():
            silent = metrics.get(prefix + GRADIENT_NORM) == 0 or (
                compared and metrics.get(prefix + GROUPS_WITHOUT_SIGNAL) == 1
            )
            self._steps[prefix] = self._steps[prefix] + 1 if silent else 0
        return {prefix + STEPS_WITHOUT_SIGNAL: float(steps) for prefix, steps in self._steps.items()}
