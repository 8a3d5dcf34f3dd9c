"""`RUN/activity.json`: what a run does at this moment and since when, for `slimx status`.

Written anew every `EVERY_S` seconds, so that a run that hangs can be told from one that waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slimx.durable import write_atomic
from slimx.errors import SlimxError

EVERY_S = 2.0
FILE = "activity.json"
SHOWN = 8
"""Late ranks that are named."""

PARTS: Mapping[str, tuple[str, str]] = {
    "start": ("start", "start"),
    "generate": ("wait for rollouts", "generate"),
    "prepare": ("wait for the driver, which packs the batch", ""),
    "values": ("compute values and advantages", ""),
    "train": ("train", ""),
    "publish": ("send their weights", "take new weights"),
    "sleep": ("take their memory back", "give their memory to the trainers"),
    "wake": ("give their memory to the engines", "take their memory back"),
    "probe": ("compare log-probs with an engine's", "score rollouts"),
    "eval": ("wait for the evaluation", "answer held-out prompts"),
    "save": ("write a checkpoint", ""),
    "save_wait": ("wait until the last checkpoint is on disk", ""),
    "export": ("export their weights", ""),
}
"""Work of trainers and engines in each phase of the loop; "" of engines: what rollouts there are lets them do."""


class Activity:
    """The file of one run."""

    def __init__(
        self,
        directory: Path,
        look: Callable[[], dict[str, Any]],
        warn: Callable[[str], None],
        *,
        watch: Callable[[dict[str, Any]], None] = lambda activity: None,
    ) -> None:
        """`look` says what is to be written; `warn` is told once if it cannot be. `watch` is shown the same."""
        self._path, self._look, self._warn, self._watch = directory / FILE, look, warn, watch
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
                self._watch(activity := self._look())
                text = json.dumps({"written": time.time(), **activity})
                write_atomic(self._path, text.encode(), sync=False)
            except OSError as error:
                self._warn(f"{self._path} cannot be written ({error}); slimx status will not say what the run does")
                return
            await asyncio.sleep(EVERY_S)


def read_activity(directory: Path) -> dict[str, Any] | None:
    """{written, step: in progress, phase, number: of phases so far, since, rollouts: None or `RolloutManager.status`,
    awaited: None or {what, since} while no engine serves, late: None or what trainer ranks are asked for and who has
    not answered}; None before the first."""
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


def activity_lines(activity: dict[str, Any], now: float, usual: float | None) -> list[str]:
    """The activity as lines of text; `now`: of `time.time()`, `usual`: seconds of the phase at other times."""
    phase, rollouts = activity["phase"], activity["rollouts"]
    trainers, engines = PARTS.get(phase, (phase, ""))
    lines = [f"now      step {activity['step']}: {phase} for {_seconds(now - activity['since'])}"]
    if usual is not None:
        lines[0] += f", usually {_seconds(usual)}"
    if (silent := now - activity["written"]) > 10 * EVERY_S:
        lines.append(f"         last heard of {_seconds(silent)} ago: the driver is busy, stopped, or lost")
    if (awaited := activity.get("awaited")) is not None:
        lines.append(f"waits    for {awaited['what']}, for {_seconds(now - awaited['since'])}; deadlines stand still")
    lines.append(f"trainers {trainers}")
    if (late := activity.get("late")) is not None and 0 < len(late["ranks"]) < late["of"]:
        more = f" and {len(late['ranks']) - SHOWN} more" * (len(late["ranks"]) > SHOWN)
        lines.append(f"late     {', '.join(late['ranks'][:SHOWN])}{more}: the others have answered for {late['what']}")
        lines += [f"         log {log}" for log in late["logs"][:SHOWN]]
    if rollouts is None:
        return lines
    if not engines:
        engines = "rest until the next batch is waited for" if rollouts["rests"] else "generate ahead"
        if not rollouts["generating"] and not rollouts["rests"]:
            engines = "have nothing to do: all that the staleness bound lets them generate is done"
    lines.append(f"engines  {engines}; {rollouts['requests']} requests are out")
    held = f", {rollouts['held']} more wait for the next version" if rollouts["held"] else ""
    lines.append(
        f"rollouts {rollouts['open']} groups: {rollouts['generating']} generated, {rollouts['done']} done{held}"
    )
    if (oldest := rollouts["oldest"]) is not None:
        late = f", due at step {oldest['due']}" if oldest["due"] is not None else ""
        lines.append(
            f"oldest   group {oldest['group']} of prompt {oldest['prompt']}, for {_seconds(now - oldest['since'])}: "
            f"{oldest['done']} of {oldest['rollouts']} rollouts done, begun by version {oldest['version']}{late}"
        )
    return lines


def _seconds(seconds: float) -> str:
    """`12 s`, `3 min 5 s`, `2 h 5 min`."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
