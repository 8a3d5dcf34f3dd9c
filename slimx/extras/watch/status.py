"""`slimx status`, a run described from its directory alone: how far it is, whether it still writes, its engines; and
`slimx stacks`, where its processes on this machine are in their Python code."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from slimx.config.sections.run import Stall
from slimx.errors import SlimxError
from slimx.extras.watch.events.alerts import without_signal
from slimx.extras.watch.events.pace import SILENT_S, Pace, last_lines, pace
from slimx.observability.live.activity import activity_lines, read_activity
from slimx.observability.live.run_lock import is_held
from slimx.observability.live.stacks import stacks, stacks_text
from slimx.observability.tracking.run_files import check_run, read_config, up_to_date


class State(StrEnum):
    """States of a run, as `slimx status --check` tells them by its exit status."""

    RUNNING = "running"
    FINISHED = "finished"
    STALLED = "stalled"
    """A process trains there, but its phase takes too long (`track.stall`), or it has not been heard of."""
    DEAD = "dead"
    """No process trains there, and the run is not finished."""

    @property
    def exit_status(self) -> int:
        """0, 3, 4 or 5. A directory without a run ends with 2, like every refusal."""
        return {State.RUNNING: 0, State.FINISHED: 3, State.STALLED: 4, State.DEAD: 5}[self]


def run_status(directory: Path) -> dict[str, Any]:
    """{name, state, running, finished, step, steps, seconds_ago, metrics: of the last step, phase: the last one that
    ended, engines, routers, activity: what it does now, or did last, usual_seconds: of that phase, silent_seconds:
    since the driver was last heard of}.

    `running` is whether a process trains there, `seconds_ago` when a step was last written. Raises SlimxError for a
    directory that holds no run."""
    config = read_config(directory)
    metrics = directory / "metrics.jsonl"
    last = _last_line(metrics)
    engines = directory / "engines.json"
    roster = json.loads(engines.read_text()) if engines.exists() else {}
    activity, now = read_activity(directory), time.time()
    stall = Stall.model_validate(config.get("track", {}).get("stall") or {})
    at = None if activity is None else pace(directory, activity, now, factor=stall.factor, at_least=stall.at_least)
    silent = None if activity is None else now - activity["written"]
    running = is_held(directory)
    finished = not running and up_to_date(directory, "summary.json")
    return {
        "name": config["run"]["name"],
        "state": _state(running, finished, at, silent),
        "running": running,
        "finished": finished,
        "step": last.get("step", 0),
        "steps": config["schedule"]["steps"],
        "seconds_ago": round(time.time() - metrics.stat().st_mtime) if last else None,
        "metrics": last.get("metrics", {}),
        "phase": _last_line(directory / "timeline.jsonl").get("name"),
        "engines": roster.get("engines", []),
        "routers": roster.get("routers", []),
        "activity": activity,
        "usual_seconds": None if at is None else at.usual,
        "silent_seconds": silent,
    }


def _state(running: bool, finished: bool, at: Pace | None, silent: float | None) -> State:
    if not running:
        return State.FINISHED if finished else State.DEAD
    # Before its first word a run starts; what it waits for then has deadlines of its own.
    stalled = at is not None and (at.stalled or silent > SILENT_S)
    return State.STALLED if stalled else State.RUNNING


SHOWN = ("reward/mean", "loss/policy", "loss/sft", "gap/mean", "staleness/max", "time/step")

_OF_POLICY = re.compile(r"policy/([^/]+)/[^/]+/")


def describe_status(status: dict[str, Any]) -> list[str]:
    """The status as lines of text. Engines of a run that has ended are not shown: they are gone."""
    state = "not running" if status["state"] is State.DEAD else str(status["state"])
    ago = "" if status["seconds_ago"] is None else f", written {status['seconds_ago']} s ago"
    phase = f", last phase {status['phase']}" if status["phase"] and not status["finished"] else ""
    lines = [f"run      {status['name']}: {state}, step {status['step']} of {status['steps']}{ago}{phase}"]
    metrics = status["metrics"]
    if shown := _shown(metrics):
        lines.append(f"step     {shown}")
    policies = dict.fromkeys(match[1] for key in metrics if (match := _OF_POLICY.match(key)))
    lines += [f"policy   {name}: {_shown(metrics, f'policy/{name}/')}" for name in policies]
    lines += [f"signal   {prefix and prefix + ': '}{sentence}" for prefix, sentence in without_signal(metrics).items()]
    if not status["running"]:
        return lines
    if status["activity"] is not None:
        lines += activity_lines(status["activity"], time.time(), status["usual_seconds"])
    for engine in status["engines"]:
        kind = "frozen" if engine["frozen"] else engine["role"]
        nodes = f", {engine['nodes']} machines" if engine["nodes"] > 1 else ""
        again = f", started again: {engine['restarts']}" if engine["restarts"] else ""
        lines.append(f"engine   {engine['name']} ({kind}): {engine['standing']} at {engine['url']}{nodes}{again}")
        lines += _restarts(engine)
    for router in status["routers"]:
        up = "up" if router["up"] else "out"
        lines.append(f"router   {router['name']}: {up} at {router['url']}")
        lines += _restarts(router)
    return lines


def _shown(metrics: Mapping[str, float], prefix: str = "") -> str:
    """The metrics of SHOWN that there are, under names that begin with `prefix`."""
    return ", ".join(f"{key} {metrics[prefix + key]:.4g}" for key in SHOWN if metrics.get(prefix + key) is not None)


def _restarts(part: dict[str, Any]) -> list[str]:
    """A line for each of the last restarts of an engine or a router."""
    lines = []
    for restart in part.get("history", []):
        when = time.strftime("%H:%M:%S", time.localtime(restart["at"]))
        how = f"failed: {restart['error']}" if restart["error"] else "succeeded"
        lines.append(f"         {when} restart after {restart['reason']}: {how} ({restart['seconds']:.0f} s)")
    return lines


def _last_line(file: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines; {} where there is none. Reads at most 256 KiB."""
    last = last_lines(file, 2**18)[-1:]
    return json.loads(last[0]) if last and last[0].strip() else {}


def run_stacks(directory: Path) -> str:
    """The stacks as text. Raises SlimxError for a directory without a run, or where none of its processes runs here."""
    check_run(directory)
    found = stacks(directory)
    if not found:
        raise SlimxError(
            f"no process of {directory} runs on {socket.gethostname()}, or none that this user may see; ask on the "
            "machines of the run, as its user or as root",
            code="stacks.none",
            about=str(directory),
        )
    return stacks_text(found)
