"""The file RUN/alerts.jsonl, which contains a line for each alert that opened or closed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec

from slimx.config.sections.eval import Eval
from slimx.durable import write_atomic
from slimx.errors import SlimxError
from slimx.extras.alerts.curves.watch import Curves
from slimx.extras.alerts.finding import Finding
from slimx.extras.alerts.remedies import REMEDIES
from slimx.observability.tracking.jsonl import load_records
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.run_files import read_config

FILE = "alerts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert of a run. It is open until `closed` is set."""

    name: str
    about: str
    """Policy, data set, directory or GPU; "" for the policy `actor`."""
    text: str
    """One line with the value and its usual range when the alert opened."""
    value: float | None
    usual: str
    remedy: str
    step: int | None
    """Step at which the alert opened; None before the first step."""
    opened: float
    """Unix time at which the alert opened."""
    closed: float | None = None
    """Unix time at which the alert closed; None while it is open."""
    closed_step: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.about

    @property
    def title(self) -> str:
        """Name of the alert and, in parentheses, what it concerns."""
        if not self.about:
            return self.name
        return f"{self.name} ({self.about})"

    @property
    def line(self) -> str:
        """One line with value, usual range and remedy."""
        return f"{self.title}: {self.text}; {self.remedy}"


def opened(finding: Finding, step: int | None, at: float) -> Alert:
    """Returns the alert that `finding` opens at Unix time `at`."""
    return Alert(
        name=finding.name,
        about=finding.about,
        text=finding.text,
        value=finding.value,
        usual=finding.usual,
        remedy=REMEDIES[finding.name],
        step=step,
        opened=at,
    )


class AlertLog:
    """Open and past alerts of a run, which are also written to `RUN/alerts.jsonl`."""

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        """Reads the alerts that an earlier process has left. `warn` is called once with a message if a file cannot
        be read or written."""
        self._file = directory / FILE
        self._warn: Callable[[str], None] | None = warn
        self.alerts = read_log(self._file)

    def open_alerts(self) -> dict[tuple[str, str], Alert]:
        """Returns the open alerts by name and what they concern."""
        return {alert.key: alert for alert in self.alerts if alert.closed is None}

    def put(self, alert: Alert) -> None:
        """Adds an alert, or replaces the open one with the same name and concern."""
        kept = []
        for old in self.alerts:
            if old.closed is not None or old.key != alert.key:
                kept.append(old)
        self.alerts = [*kept, alert]
        try:
            with self._file.open("ab") as file:
                file.write(_line(alert))
        except OSError as error:
            self.fail(FILE, error)

    def restart(self, alerts: Iterable[Alert]) -> None:
        """Replaces all alerts."""
        self.alerts = list(alerts)
        try:
            write_atomic(self._file, *map(_line, self.alerts))
        except OSError as error:
            self.fail(FILE, error)

    def fail(self, name: str, error: OSError) -> None:
        """Reports once that a file of the run's directory cannot be read or written."""
        if self._warn is not None:
            file = self._file.with_name(name)
            self._warn(f"{file} cannot be used ({error.strerror}); slimx alerts will miss alerts of this run")
            self._warn = None


def _line(alert: Alert) -> bytes:
    return json.dumps(asdict(alert)).encode() + b"\n"


def read_log(file: Path) -> list[Alert]:
    """Returns the alerts in a log, in the order in which they last changed; [] if there is no file. Damaged lines are
    left out."""
    if not file.is_file():
        return []
    found: dict[tuple[str, str, float], Alert] = {}
    for alert in load_records(file, lambda values: msgspec.convert(values, type=Alert))[0]:
        found.pop((*alert.key, alert.opened), None)
        found[(*alert.key, alert.opened)] = alert
    return list(found.values())


def alerts_of(directory: Path) -> list[Alert]:
    """Returns the alerts of the run in `directory`. Those of a run without a log, which an older version of slimx has
    trained, are computed from its metrics. Raises SlimxError for a directory without a run."""
    config = read_config(directory)
    file = directory / FILE
    if file.is_file():
        return read_log(file)
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        return []
    status = metrics.stat()
    rollout = config.get("rollout") or {}
    off = (config.get("alerts") or {}).get("disabled") or ()
    groups = int(rollout.get("prompts_per_step") or 1)
    passing = least_passing(directory)
    return list(_computed(metrics, groups, tuple(off), passing, status.st_mtime_ns, status.st_size))


def least_passing(directory: Path) -> float:
    """Returns the least reward of an answer that passes in the run in `directory`, its `eval.passing`; the default if
    config.yaml is missing or damaged."""
    try:
        return float(read_config(directory)["eval"]["passing"])
    except (SlimxError, KeyError, TypeError, ValueError):
        return Eval().passing


@lru_cache(maxsize=4)
def _computed(
    metrics: Path, groups: int, off: tuple[str, ...], passing: float, mtime_ns: int, size: int
) -> tuple[Alert, ...]:
    """Returns the alerts that the metrics in a file would have opened. The file's time and size are part of the cache's
    key."""
    curves = Curves(groups, off, passing=passing)
    return tuple(replayed(curves, load_records(metrics, StepRecord.from_json)[0]))


def replayed(curves: Curves, records: Iterable[StepRecord]) -> list[Alert]:
    """Returns the alerts that the metrics of `records` open and close, in the order in which they last changed.
    `curves` then has the history of the metrics."""
    alerts: dict[tuple[str, str, float], Alert] = {}
    current: dict[tuple[str, str], tuple[str, str, float]] = {}
    for record in records:
        for opens, finding in curves.look(record.metrics):
            key = finding.name, finding.about
            if opens:
                current[key] = (*key, record.time)
                alerts[current[key]] = opened(finding, record.step, record.time)
            else:
                at = current.pop(key)
                alerts[at] = replace(alerts.pop(at), closed=record.time, closed_step=record.step)
    return list(alerts.values())


def alert_lines(alerts: Sequence[Alert]) -> Iterator[str]:
    """Yields a line for each alert, open ones first; one line that says so if there are none."""
    if not alerts:
        yield "no alerts"
    for alert in sorted(alerts, key=lambda alert: (alert.closed is not None, alert.opened)):
        if alert.closed is None:
            yield f"open  since {_when(alert.step, alert.opened)}  {alert.line}"
        else:
            over = _when(alert.closed_step, alert.closed)
            yield f"past  {_when(alert.step, alert.opened)} to {over}  {alert.title}: {alert.text}"


def _when(step: int | None, at: float) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
    if step is None:
        return moment
    return f"step {step} ({moment})"
