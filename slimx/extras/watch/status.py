"""`slimx status` and `slimx stacks`. The first describes a run from its directory alone: its progress, whether it is
running, and its engines. The second shows the Python stacks of the run's processes on this machine."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from slimx.cluster.restarts import Restart
from slimx.config.sections.general import Stall
from slimx.config.sections.policies import policy_of
from slimx.errors import SlimxError, duration
from slimx.extras.alerts.lines import last_lines
from slimx.extras.alerts.log import alerts_of
from slimx.extras.alerts.pace import SILENT_S, PhasePace, phase_pace
from slimx.extras.report.meanings import shown
from slimx.observability.live.activity import activity_lines, read_activity
from slimx.observability.live.run_lock import is_locked
from slimx.observability.live.stacks import stacks, stacks_text
from slimx.observability.tracking.run_files import check_run, read_config, up_to_date


class RunCondition(StrEnum):
    """State of a run. `slimx status --check` exits with its `exit_status`."""

    RUNNING = "running"
    FINISHED = "finished"
    STALLED = "stalled"
    """State in which a process is training, but its phase takes too long (`track.stall`) or the driver has not updated
    its activity for `SILENT_S` seconds."""
    DEAD = "dead"
    """State in which no process is training and the run is not finished."""

    @property
    def exit_status(self) -> int:
        """Exit status for the state: 0 if running, 3 if finished, 4 if stalled, 5 if dead. The command exits with 2 for
        a directory without a run, as for every error."""
        return {RunCondition.RUNNING: 0, RunCondition.FINISHED: 3, RunCondition.STALLED: 4, RunCondition.DEAD: 5}[self]


def run_status(directory: Path) -> dict[str, Any]:
    """Returns {name, state, running, finished, step, steps, seconds_ago, metrics, alerts, phase, engines, routers,
    activity, usual_seconds, silent_seconds}.

    `running` is True if a process is training. `seconds_ago` is the time since a step was last written, `metrics` are
    those of the last step, `alerts` are lines about open alerts, and `phase` is the phase that ended last. `activity`
    is the current or last activity, `usual_seconds` the usual duration of its phase, and `silent_seconds` the time
    since the driver last wrote it.
    Raises SlimxError for a directory without a run."""
    config = read_config(directory)
    metrics = directory / "metrics.jsonl"
    last = _last_step(metrics)
    engines = directory / "engines.json"
    roster = {}
    if engines.exists():
        roster = json.loads(engines.read_text())
    activity = read_activity(directory)
    stall = Stall.model_validate(config.get("track", {}).get("stall") or {})
    pace = None
    usual = None
    silent = None
    if activity is not None:
        now = time.time()
        pace = phase_pace(directory, activity, now, factor=stall.factor, at_least=stall.at_least)
        usual = pace.usual
        silent = now - activity["written"]
    seconds_ago = None
    if last:
        seconds_ago = max(0, round(time.time() - metrics.stat().st_mtime))
    running = is_locked(directory)
    finished = not running and up_to_date(directory, "summary.json")
    return {
        "name": config["run"]["name"],
        "state": _state(running, finished, pace, silent),
        "running": running,
        "finished": finished,
        "step": last.get("step", 0),
        "steps": config["schedule"]["steps"],
        "seconds_ago": seconds_ago,
        "metrics": last.get("metrics", {}),
        "alerts": [alert.line for alert in alerts_of(directory) if alert.closed is None],
        "phase": _last_line(directory / "timeline.jsonl").get("name"),
        "engines": roster.get("engines", []),
        "routers": roster.get("routers", []),
        "activity": activity,
        "usual_seconds": usual,
        "silent_seconds": silent,
    }


def _state(running: bool, finished: bool, pace: PhasePace | None, silent: float | None) -> RunCondition:
    if not running:
        return RunCondition.FINISHED if finished else RunCondition.DEAD
    # Without an activity the run is still starting; separate timeouts apply to that.
    if pace is not None and pace.stalled or silent is not None and silent > SILENT_S:
        return RunCondition.STALLED
    return RunCondition.RUNNING


STATES: Mapping[str, str] = {
    "out": "not serving: starts or restarts",
    "joining": "not serving: waits for the next weight sync",
    "member": "serving",
    "gone": "lost: no restarts left",
}
"""Descriptions of the states of engines as members of a run."""

WORDS: Mapping[str, str] = {
    "gap/mean": "gap: train-inference mismatch of log-probs",
    "staleness/max": "staleness: versions between sampling and training",
}
"""Usual words for terms in the names of shown metrics."""

SHOWN = ("reward/mean", "loss/policy", "loss/sft", "gap/mean", "staleness/max", "time/step")


def describe_status(status: dict[str, Any]) -> list[str]:
    """Returns the result of `run_status` as lines of text. Engines of a run that is not running are omitted."""
    state = str(status["state"])
    if status["state"] is RunCondition.DEAD:
        state = "not running"
    line = f"run      {status['name']}: {state}, step {status['step']} of {status['steps']}"
    if status["seconds_ago"] is not None:
        line += f", written {duration(status['seconds_ago'])} ago"
    if status["phase"] and not status["finished"]:
        line += f", last phase {status['phase']}"
    lines = [line]
    metrics = status["metrics"]
    values = _shown(metrics)
    if values:
        lines.append(f"step     {values}")
    words = [text for key, text in WORDS.items() if metrics.get(key) is not None]
    if words:
        lines.append(f"         of step {status['step']} alone; {'; '.join(words)}")
    lines += [f"policy   {name}: {_shown(metrics, f'policy/{name}/')}" for name in _policies(metrics)]
    lines += [f"alert    {line}" for line in status["alerts"]]
    if not status["running"]:
        return lines
    if status["activity"] is not None:
        lines += activity_lines(status["activity"], time.time(), status["usual_seconds"])
    for engine in status["engines"]:
        kind = "frozen" if engine["frozen"] else engine["role"]
        state = engine["standing"]
        if state in STATES:
            state += f" ({STATES[state]})"
        line = f"engine   {engine['name']} ({kind}): {state} at {engine['url']}"
        if engine["nodes"] > 1:
            line += f", {engine['nodes']} machines"
        if engine["restarts"]:
            line += f", restarts: {engine['restarts']}"
        lines.append(line)
        lines += _restarts(engine)
    for router in status["routers"]:
        up = "up" if router["up"] else "down"
        lines.append(f"router   {router['name']}: {up} at {router['url']}")
        lines += _restarts(router)
    return lines


def _policies(metrics: Mapping[str, float]) -> list[str]:
    """Returns the names of the policies for which `metrics` contains separate metrics."""
    names: dict[str, None] = {}
    for key in metrics:
        name = policy_of(key)[0]
        if name:
            names[name] = None
    return list(names)


def _shown(metrics: Mapping[str, float], prefix: str = "") -> str:
    """Formats those of the most important metrics (`SHOWN`) that `metrics` contains. `prefix`: prefix of their names in
    `metrics`."""
    parts = []
    for key in SHOWN:
        value = metrics.get(prefix + key)
        if value is not None:
            parts.append(f"{key} {shown(key, value)}")
    return ", ".join(parts)


def _restarts(part: dict[str, Any]) -> list[str]:
    """Returns a line for each recent restart of `part`, an engine or a router."""
    return [f"         {Restart(**restart)}" for restart in part.get("history", [])]


def _last_step(file: Path) -> dict[str, Any]:
    """Returns the line of the newest step in metrics.jsonl; {} if there is none. Results of evaluations during training
    are lines of earlier steps. Reads at most 256 KiB."""
    last: dict[str, Any] = {}
    for line in last_lines(file, 2**18):
        with suppress(ValueError):  # the first line may be incomplete
            record = json.loads(line)
            if record["step"] > last.get("step", -1):
                last = record
    return last


def _last_line(file: Path) -> dict[str, Any]:
    """Returns the last complete line of a file of JSON lines; {} if there is none. Reads at most 256 KiB."""
    last = last_lines(file, 2**18)[-1:]
    if not last or not last[0].strip():
        return {}
    return json.loads(last[0])


def run_stacks(directory: Path) -> str:
    """Returns the Python stacks of the run's processes on this machine as text. Raises SlimxError for a directory
    without a run, or if no process of the run is found on this machine."""
    check_run(directory)
    found = stacks(directory)
    if not found:
        raise SlimxError(
            f"no process of the run {directory} is visible to this user on {socket.gethostname()}; run this command "
            "on a machine of the run, as the user of the run or as root",
            code="stacks.none",
            about=str(directory),
        )
    return stacks_text(found)
