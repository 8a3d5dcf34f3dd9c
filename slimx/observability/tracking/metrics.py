"""Metrics of a step: flat `section/name` keys, one record per step, its strict-JSON form, and the count of steps from
which a policy learned nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slimx.errors import SlimxError
from slimx.json_types import Json

STEPS_WITHOUT_SIGNAL = "optim/steps_without_signal"
"""Metric that counts consecutive steps without a signal."""
GROUPS_WITHOUT_SIGNAL = "reward/groups_without_signal"
GRADIENT_NORM = "optim/grad_norm"


def flatten(metrics: Mapping[str, object]) -> dict[str, float]:
    """Names nested metrics by their path: `{"loss": {"policy": 0.1}}` becomes `{"loss/policy": 0.1}`.

    A leaf is a number, a boolean, or a one-element array or tensor (read with `.item()`, which waits for its device).
    A flat mapping is returned unchanged. Raises SlimxError for any other leaf and for a duplicate name.
    """
    flat: dict[str, float] = {}
    _collect("", metrics, flat)
    return flat


def _collect(prefix: str, metrics: Mapping[str, object], flat: dict[str, float]) -> None:
    for key, value in metrics.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            _collect(name, value, flat)
            continue
        if name in flat:
            raise SlimxError(
                f"metric {name} is logged twice in one step; rename one of the two",
                code="metrics.twice",
                about=name,
            )
        flat[name] = as_number(name, value)


def as_number(name: str, value: object) -> float:
    """Returns a metric's value as a float, which may be NaN or infinite. Raises SlimxError if it is not one number."""
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:  # torch raises the first, numpy the second
            raise SlimxError(
                f"metric {name} has several numbers; reduce it to one before logging",
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
    """Metrics of one step.

    In JSON a number that is not finite is null under `metrics`, and `nonfinite`, otherwise absent, has its name:
    `{"step": 3, "version": 2, "time": 1.7e9, "metrics": {"loss/policy": null}, "nonfinite": {"loss/policy": "nan"}}`.
    """

    step: int
    """Step of the loop, >= 0."""
    version: int | None
    """Weight version at the step; None without one, as in supervised fine-tuning."""
    time: float
    """Time of logging, unix seconds."""
    metrics: dict[str, float]
    """`section/name` -> value, which may be NaN or infinite."""

    def __post_init__(self) -> None:
        if self.step < 0:
            raise SlimxError(
                f"a step record has step {self.step}; steps start at 0",
            )

    def to_json(self) -> Json:
        """Returns the record as strict JSON values, as described for the class."""
        metrics: dict[str, float | None] = dict(self.metrics)
        nonfinite = {}
        for key, value in self.metrics.items():
            if not math.isfinite(value):
                nonfinite[key] = str(value)
        record: Json = {"step": self.step, "version": self.version, "time": self.time, "metrics": metrics}
        if nonfinite:
            metrics |= dict.fromkeys(nonfinite)
            record["nonfinite"] = nonfinite
        return record

    @classmethod
    def from_json(cls, record: Json) -> StepRecord:
        """Reads a record written by `to_json`. Raises KeyError, TypeError, ValueError or SlimxError for others."""
        nonfinite = record.get("nonfinite", {})
        metrics = {}
        for key, value in record["metrics"].items():
            metrics[key] = float(nonfinite[key] if value is None else value)
        return cls(step=int(record["step"]), version=record["version"], time=float(record["time"]), metrics=metrics)


class Signal:
    """Counts consecutive steps from which a trained policy learned nothing: all rollouts of a group had the same
    reward, or the gradient was 0. Each process counts from 0."""

    def __init__(self, compared: Mapping[str, bool]):
        """Takes `compared`: by the prefix of each policy's metrics, True if its advantages come only from comparing the
        rollouts of a group."""
        self._compared = compared
        self._steps = dict.fromkeys(compared, 0)

    def counted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Updates the counts with a step's metrics, and returns them as metrics."""
        for prefix, compared in self._compared.items():
            silent = metrics.get(prefix + GRADIENT_NORM) == 0 or (
                compared and metrics.get(prefix + GROUPS_WITHOUT_SIGNAL) == 1
            )
            self._steps[prefix] = self._steps[prefix] + 1 if silent else 0
        return {prefix + STEPS_WITHOUT_SIGNAL: float(steps) for prefix, steps in self._steps.items()}
