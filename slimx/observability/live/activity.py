"""The file `RUN/activity.json`, which contains what a run is doing now and since when, for `slimx status`.

The driver rewrites the file every `EVERY_S` seconds, so an old file shows that the driver hangs or has died.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from slimx.durable import write_atomic
from slimx.errors import SlimxError, counted, duration
from slimx.json_types import Json
from slimx.observability.tracking.guard import Guard

EVERY_S = 2.0
"""Interval between two writes of the activity file, in seconds."""
FILE = "activity.json"
SHOWN = 8
"""Maximum number of late ranks (those that have not finished the current call) that `slimx status` lists."""

PARTS: Mapping[str, tuple[str, str]] = {
    "start": ("start", "start"),
    "generate": ("wait for rollouts", "generate"),
    "prepare": ("wait until the driver has packed the batch", ""),
    "values": ("compute values and advantages", ""),
    "train": ("train", ""),
    "publish": ("send weights", "receive weights"),
    "sleep": ("reload onto the devices", "release their memory to the trainers"),
    "wake": ("release their memory to the engines", "restore their memory"),
    "probe": ("compare their log-probs with an engine's", "score rollouts"),
    "eval": ("wait for the evaluation", "answer held-out prompts"),
    "save": ("write a checkpoint", ""),
    "save_wait": ("wait until the last checkpoint is written", ""),
    "export": ("export weights", ""),
}
"""Descriptions, for `slimx status`, of what trainers and engines do in each phase of the training loop, by phase name.
Engines with the description "" generate or wait, depending on the state of the rollouts."""


@asynccontextmanager
async def writing_activity(
    directory: Path,
    look: Callable[[], Json],
    warn: Callable[[str], None],
    *,
    watch: Callable[[Json], None] = lambda activity: None,
) -> AsyncIterator[None]:
    """Writes the activity file of the run in `directory` every `EVERY_S` seconds of the `with` block. `look`: function
    that returns the current activity. `watch` is called with each activity before it is written. `warn` is called with
    a message about the first failure, after which the file is written if that is possible again."""
    guard = Guard(FILE, warn)

    def write() -> None:
        activity = look()
        watch(activity)
        text = json.dumps({"written": time.time(), **activity})
        write_atomic(directory / FILE, text.encode(), sync=False)

    async def keep() -> None:
        while True:
            guard.call(write)
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(keep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def read_activity(directory: Path) -> Json | None:
    """Returns the newest activity that the run in `directory` has written; None if there is none.

    Keys: `written` (Unix time), `step` (number of the step in progress), `phase`, `number` (number of phases so far)
    and `since` (start of the phase); `rollouts`: result of `RolloutManager.status`, or None; `awaited`: while engines
    cannot serve, a dict of the cause (`what`) and the start of the outage (`since`), otherwise None; `late`: the
    current call to trainer ranks and the ranks that have not responded (`RankGroup.late`), or None."""
    file = directory / FILE
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise SlimxError(
            f"{file} is damaged ({error}); remove the file (a run in progress will write a new one)",
            code="run.activity",
            about=str(file),
        ) from error


def activity_lines(activity: Json, now: float, usual: float | None) -> list[str]:
    """Formats `activity`, a result of `read_activity`, as lines of text. `now`: current Unix time. `usual`: usual
    duration of the current phase in seconds, if known."""
    phase = activity["phase"]
    trainers, engines = PARTS.get(phase, (phase, ""))
    now = max(now, activity["written"])  # the clock of the run's machine may be ahead
    lines = [f"now      step {activity['step']}: {phase} for {duration(now - activity['since'])}"]
    if usual is not None:
        lines[0] += f", usually {duration(usual)}"
    silent = now - activity["written"]
    if silent > 10 * EVERY_S:
        lines.append(f"         last update {duration(silent)} ago: the driver is busy, stopped or lost")
    awaited = activity.get("awaited")
    if awaited is not None:
        lines.append(f"waits    for {awaited['what']}, for {duration(now - awaited['since'])}; deadlines are suspended")
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
        f"late     {ranks}: only these have not finished {late['what']}",
        *(f"         log {log}" for log in late["logs"][:SHOWN]),
    ]


def _rollout_lines(rollouts: Json, engines: str, now: float) -> list[str]:
    if not engines:
        engines = _engine_work(rollouts)
    groups = f"{counted(rollouts['open'], 'group')}: {rollouts['generating']} generating, {rollouts['done']} complete"
    if rollouts["held"]:
        groups += f", {rollouts['held']} more start after the next publication (weight sync)"
    lines = [f"engines  {engines}; {counted(rollouts['requests'], 'request')} in flight", f"rollouts {groups}"]
    oldest = rollouts["oldest"]
    if oldest is not None:
        lines.append(
            f"oldest   group {oldest['group']} of prompt {oldest['prompt']}, started "
            f"{duration(now - oldest['since'])} ago with version {oldest['version']}: {oldest['done']} of "
            f"{counted(oldest['rollouts'], 'rollout')} complete"
        )
        if oldest["due"] is not None:
            lines[-1] += f", trained in step {oldest['due']} at the latest"
    return lines


def _engine_work(rollouts: Json) -> str:
    if rollouts["rests"]:
        return "pause until the next step waits for a batch"
    if rollouts["generating"]:
        return "generate ahead"
    return "are idle, because everything that the staleness bound allows is generated"
