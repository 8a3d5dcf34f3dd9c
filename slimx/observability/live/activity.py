"""`RUN/activity.json`: the current activity of a run and its start time, for `slimx status`.

It is rewritten every `EVERY_S` seconds, which distinguishes a run that hangs from one that waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slimx.durable import write_atomic
from slimx.errors import SlimxError
from slimx.json_types import Json

EVERY_S = 2.0
"""Seconds between two writes."""
FILE = "activity.json"
SHOWN = 8
"""Maximum number of late ranks to list."""

PARTS: Mapping[str, tuple[str, str]] = {
    "start": ("start", "start"),
    "generate": ("wait for rollouts", "generate"),
    "prepare": ("wait for the driver to pack the batch", ""),
    "values": ("compute values and advantages", ""),
    "train": ("train", ""),
    "publish": ("send weights", "receive weights"),
    "sleep": ("take back their memory", "release their memory to the trainers"),
    "wake": ("release their memory to the engines", "take back their memory"),
    "probe": ("compare log-probs with an engine's", "score rollouts"),
    "eval": ("wait for the evaluation", "answer held-out prompts"),
    "save": ("write a checkpoint", ""),
    "save_wait": ("wait for the last checkpoint to reach the disk", ""),
    "export": ("export weights", ""),
}
"""Work of trainers and engines in each phase of the loop; "" for engines whose work depends on the rollouts."""


class Activity:
    """Writes the activity file of one run."""

    def __init__(
        self,
        directory: Path,
        look: Callable[[], Json],
        warn: Callable[[str], None],
        *,
        watch: Callable[[Json], None] = lambda activity: None,
    ) -> None:
        """Takes `look`, which returns the activity, and `watch`, which receives it. `warn` is called once if the file
        cannot be written."""
        self._path = directory / FILE
        self._look = look
        self._warn = warn
        self._watch = watch
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Activity:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                activity = self._look()
                self._watch(activity)
                text = json.dumps({"written": time.time(), **activity})
                write_atomic(self._path, text.encode(), sync=False)
            except OSError as error:
                self._warn(f"{self._path} cannot be written ({error}); slimx status will not show the activity")
                return
            await asyncio.sleep(EVERY_S)


def read_activity(directory: Path) -> Json | None:
    """Returns the last written activity; None before the first. Its keys:

    written, step (in progress), phase, number (of phases so far), since; rollouts: None or `RolloutManager.status`;
    awaited: None or {what, since} while no engine serves; late: None or the call in progress and the trainer ranks that
    have not responded."""
    file = directory / FILE
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise SlimxError(
            f"{file} is damaged ({error}); remove it",
            code="run.activity",
            about=str(file),
        ) from error


def activity_lines(activity: Json, now: float, usual: float | None) -> list[str]:
    """Returns the activity as lines of text. `now`: unix seconds; `usual`: usual duration of the phase in seconds."""
    phase = activity["phase"]
    trainers, engines = PARTS.get(phase, (phase, ""))
    lines = [f"now      step {activity['step']}: {phase} for {_seconds(now - activity['since'])}"]
    if usual is not None:
        lines[0] += f", usually {_seconds(usual)}"
    silent = now - activity["written"]
    if silent > 10 * EVERY_S:
        lines.append(f"         last update {_seconds(silent)} ago: the driver is busy, stopped, or lost")
    awaited = activity.get("awaited")
    if awaited is not None:
        lines.append(f"waits    for {awaited['what']}, for {_seconds(now - awaited['since'])}; deadlines are suspended")
    lines.append(f"trainers {trainers}")
    late = activity.get("late")
    if late is not None and 0 < len(late["ranks"]) < late["of"]:
        lines += _late_lines(late)
    if activity["rollouts"] is not None:
        lines += _rollout_lines(activity["rollouts"], engines, now)
    return lines


def _late_lines(late: Json) -> list[str]:
    ranks = ", ".join(late["ranks"][:SHOWN])
    if len(late["ranks"]) > SHOWN:
        ranks += f" and {len(late['ranks']) - SHOWN} more"
    return [
        f"late     {ranks}: the others have responded to {late['what']}",
        *(f"         log {log}" for log in late["logs"][:SHOWN]),
    ]


def _rollout_lines(rollouts: Json, engines: str, now: float) -> list[str]:
    if not engines:
        engines = _engine_work(rollouts)
    groups = f"{rollouts['open']} groups: {rollouts['generating']} generated, {rollouts['done']} done"
    if rollouts["held"]:
        groups += f", {rollouts['held']} more wait for the next version"
    lines = [f"engines  {engines}; {rollouts['requests']} requests in flight", f"rollouts {groups}"]
    oldest = rollouts["oldest"]
    if oldest is not None:
        lines.append(
            f"oldest   group {oldest['group']} of prompt {oldest['prompt']}, for {_seconds(now - oldest['since'])}: "
            f"{oldest['done']} of {oldest['rollouts']} rollouts done, begun by version {oldest['version']}"
        )
        if oldest["due"] is not None:
            lines[-1] += f", due at step {oldest['due']}"
    return lines


def _engine_work(rollouts: Json) -> str:
    if rollouts["rests"]:
        return "pause until the next step waits for a batch"
    if rollouts["generating"]:
        return "generate ahead"
    return "are idle: everything that the staleness bound allows is generated"


def _seconds(seconds: float) -> str:
    """Formats a duration: `12 s`, `3 min 5 s`, `2 h 5 min`."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
