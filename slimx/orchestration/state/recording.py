"""What a run writes down: the files of its directory that grow with every step, and the headline of a finished run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from slimx.cluster.restarts import Restart
from slimx.config.run import Track
from slimx.data.records import Group, Prompt
from slimx.data.step_files import StepFiles
from slimx.observability.live.step_line import LiveTable
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.phases import Phase
from slimx.observability.tracking.samples import Sample
from slimx.observability.tracking.timeline import Timeline
from slimx.observability.tracking.tracker import Tracker
from slimx.rollout.flow.rollouts import GroupOutcome
from slimx.rollout.flow.tickets import Batch
from slimx.runtime.threads import in_thread


class Records:
    """The files of a run directory that grow with every step, and the table on the terminal."""

    def __init__(
        self,
        tracker: Tracker,
        timeline: Timeline,
        samples: JsonlFile,
        drops: JsonlFile,
        table: LiveTable,
        rollouts: StepFiles | None = None,
    ):
        """`rollouts`: where the groups of each step are written; None: nowhere."""
        self.tracker, self.timeline, self.samples, self.drops, self.table = tracker, timeline, samples, drops, table
        self.rollouts = rollouts
        self._keeping: asyncio.Task[Path] | None = None

    def close(self) -> None:
        self.tracker.close()
        self.timeline.close()
        self.samples.close()
        self.drops.close()

    def restarted(self, restart: Restart) -> None:
        """Put a restart into the timeline, on a track of the part that was started again."""
        name = "failed restart" if restart.error else "restart"
        detail = f"{restart.reason}; {restart.error}" if restart.error else restart.reason
        self.timeline.add(
            Phase(name=name, step=None, track=restart.part, start=restart.at, seconds=restart.seconds, detail=detail)
        )

    def step(self, step: int, version: int | None, metrics: dict[str, float], seconds: float) -> None:
        """Log a finished step with the seconds of its phases, and show it. `version`: of the engines; None: there are
        none."""
        phases = self.timeline.seconds(step)
        times = {f"time/{name}": spent for name, spent in phases.items()} | {"time/step": seconds}
        self.tracker.log(step, metrics | times, version=version)
        self.table.row(step, metrics | times)

    def keep(self, step: int, version: int, batch: Batch) -> None:
        """Begin to write the groups of `step` down, before they are trained: they are what can be looked at, and
        trained again, if that fails. `version`: of the trainers that train them."""
        if self.rollouts is not None and self.rollouts.due(step):
            work = in_thread(self.rollouts.write, step, version, batch.groups, batch.dropped)
            self._keeping = asyncio.create_task(work)

    async def kept(self) -> None:
        """Wait until they are on disk. Raises SlimxError if they cannot be written."""
        if self._keeping is not None:
            await self._keeping
            self._keeping = None

    def write_samples(
        self, groups: Sequence[Group], tokenizer: Any, track: Track, *, step: int, version: int, evaluation: bool
    ) -> None:
        """Keep the first rollout of a few groups as text."""
        for group in groups[: track.samples]:
            trajectory = group.trajectories[0]
            response = tokenizer.decode(trajectory.sampled_ids().tolist(), skip_special_tokens=True)
            sample = Sample(
                step=step,
                prompt=_text(group.prompt),
                answer=group.prompt.answer or "",
                response=response,
                reward=float("nan") if trajectory.reward is None else trajectory.reward,
                version=version,
                evaluation=evaluation,
            )
            self.samples.write(asdict(sample))


def drop_record(outcome: GroupOutcome, step: int) -> dict[str, Any]:
    """A line of dropped.jsonl."""
    return {"step": step, "prompt": outcome.group.prompt.id, "reason": outcome.reason, "detail": outcome.detail}


def _text(prompt: Prompt) -> str:
    if prompt.messages is None:
        return f"{len(prompt.token_ids or [])} token ids"
    return "\n".join(str(message.get("content", "")) for message in prompt.messages)


def summary(directory: Path) -> dict[str, Any]:
    """The headline of a finished run, from its metrics.jsonl."""
    rows = [
        json.loads(line)["metrics"] | {"_step": json.loads(line)["step"]}
        for line in (directory / "metrics.jsonl").open()
    ]

    def series(key: str) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    out: dict[str, Any] = {"steps": max((row["_step"] for row in rows), default=0)}
    rewards, accuracy, gap = series("reward/mean"), series("eval/accuracy"), series("gap/mean")
    if rewards:
        out["sampled reward, first step"] = round(rewards[0], 3)
        out["sampled reward, mean of last 10 steps"] = round(float(np.mean(rewards[-10:])), 3)
    if accuracy:
        out["held-out accuracy before"] = round(accuracy[0], 3)
        out["held-out accuracy after"] = round(accuracy[-1], 3)
    if gap:
        out["log-prob gap trainer/engine, mean over steps"] = float(f"{np.mean(gap):.2e}")
        out["tokens with a gap above 1e-5 that no route explains"] = int(sum(series("gap/tokens_unexplained")))
    if series("loss/sft"):
        out["loss, last step"] = round(series("loss/sft")[-1], 4)
    for phase in sorted({key for row in rows for key in row if key.startswith("memory/")}):
        name = phase.removeprefix("memory/").removesuffix("_peak_mib")
        out[f"trainer memory at its peak, MiB ({name})"] = round(max(series(phase)), 1)
    if skipped := int(sum(series("optim/skipped"))):
        out["optimizer steps skipped"] = skipped
    out["seconds of training"] = round(sum(series("time/step")), 1)
    return out
