"""Metrics of a step: their flat names `section/name`, their record in metrics.jsonl, and the number of consecutive
steps in which a policy learned nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slimx.errors import SlimxError
from slimx.json_types import Json

STEPS_WITHOUT_SIGNAL = "optim/steps_without_signal"
"""Name of the metric that counts consecutive steps in which a policy learned nothing."""
GROUPS_WITHOUT_SIGNAL = "reward/groups_without_signal"
GRADIENT_NORM = "optim/grad_norm"


def flatten(metrics: Mapping[str, object]) -> dict[str, float]:
    """Names nested metrics by their path: `{"loss": {"policy": 0.1}}` becomes `{"loss/policy": 0.1}`.

    Values are numbers, booleans, and arrays or tensors with one element, which are read with `.item()` (this waits for
    the tensor's device). Metrics that are not nested keep their names. Raises SlimxError for any other value, and for
    two metrics of the same name."""
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
                f"metric {name} is logged twice in one step; rename one of the two metrics",
                code="metrics.twice",
                about=name,
            )
        flat[name] = as_number(name, value)


def as_number(name: str, value: object) -> float:
    """Converts the value of metric `name` to a float, which may be NaN or infinite. Raises SlimxError if the value is
    not a single number."""
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:  # torch raises RuntimeError, numpy ValueError
            raise SlimxError(
                f"metric {name} is an array, not a scalar; reduce the array to one number before logging",
                code="metrics.number",
                about=name,
            ) from error
    if not isinstance(value, (int, float)):
        raise SlimxError(
            f"metric {name} is {value!r}, which is not a number; log a number, or do not log the metric in this step",
            code="metrics.number",
            about=name,
        )
    return float(value)


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """Metrics of one step, stored as one line of metrics.jsonl.

    In JSON, a value that is not finite is null in `metrics`, and its text is in `nonfinite`, which is present only in
    this case: `{"step": 3, "version": 2, "time": 1.7e9, "metrics": {"loss/policy": null}, "nonfinite": {"loss/policy":
    "nan"}}`."""

    step: int
    """Number of the step, from 1; 0 for measurements before the first step."""
    version: int | None
    """Version of the engines' weights in this step; None without engines, as in supervised fine-tuning."""
    time: float
    """Unix time at which the record was logged, in seconds."""
    metrics: dict[str, float]
    """Values of the metrics by name (`section/name`); a value may be NaN or infinite."""

    def __post_init__(self) -> None:
        if self.step < 0:
            raise SlimxError(
                f"the metrics of a step have the negative step number {self.step}; use a number of at least 0",
            )

    def to_json(self) -> Json:
        """Returns the record as a JSON object without NaN and infinities: such values are null in `metrics` and text in
        `nonfinite`."""
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
        """Creates a record from a result of `to_json`. Raises KeyError, TypeError, ValueError or SlimxError if `record`
        is anything else."""
        nonfinite = record.get("nonfinite", {})
        metrics = {}
        for key, value in record["metrics"].items():
            metrics[key] = float(nonfinite[key] if value is None else value)
        return cls(step=int(record["step"]), version=record["version"], time=float(record["time"]), metrics=metrics)


class Signal:
    """Counts consecutive steps in which a policy learned nothing, because in every group all rollouts had the same
    reward, or because the gradient was 0. The counts start at 0 in every process."""

    def __init__(self, compared: Mapping[str, bool]):
        """Starts the counts at 0. `compared`: prefix of a policy's metrics -> True if the policy's advantages only
        compare the rollouts of a group, and are therefore 0 if all rewards in the group are equal."""
        self._compared = compared
        self._steps = dict.fromkeys(compared, 0)

    def counted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Updates the counts from the metrics of a step, and returns the counts as metrics."""
        for prefix, compared in self._compared.items():
            silent = metrics.get(prefix + GRADIENT_NORM) == 0 or (
                compared and metrics.get(prefix + GROUPS_WITHOUT_SIGNAL) == 1
            )
            self._steps[prefix] = self._steps[prefix] + 1 if silent else 0
        return {prefix + STEPS_WITHOUT_SIGNAL: float(steps) for prefix, steps in self._steps.items()}
