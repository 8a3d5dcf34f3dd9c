"""Records of a run: the files in its directory that grow with every step, and the summary of a finished run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slimx.cluster.restarts import Restart
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR, prefix_of
from slimx.data.chat.responses import read_response
from slimx.data.records import Group, Prompt
from slimx.data.saved.step_files import StepFiles
from slimx.data.saved.trained_tokens import TrainedTokens
from slimx.errors import SlimxError, first_line
from slimx.json_types import Json
from slimx.observability.events import Events, Kind
from slimx.observability.live.table import LiveTable
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import Signal
from slimx.observability.tracking.phases import Phase, Timeline
from slimx.observability.tracking.samples import RecordedSample
from slimx.observability.tracking.tracker import Tracker, make_tracker
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.flow.tickets import Batch, Dropped
from slimx.runtime.tasks import in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Records:
    """Writers of the files in a run's directory that grow with every step, and of the live table on the terminal."""

    def __init__(
        self,
        config: Config,
        table: LiveTable,
        tokenizers: Mapping[str, PreTrainedTokenizerBase],
        events: Events,
        *,
        resume_step: int = 0,
    ):
        """Opens the files in `config.run.dir` and removes the entries of step `resume_step` and later steps from them;
        if `resume_step` is 0, those of all steps. `tokenizers`: tokenizers by policy. `events` is notified of restarts,
        lost engines and skipped steps."""
        directory = Path(config.run.dir)
        self.config = config
        self.table = table
        self.tokenizers = tokenizers
        self.rollouts: StepFiles | None = None
        """Files with the groups of each step; None if groups are not saved."""
        self.events = events
        self.tracker = open_tracker(config, resume_step, table.note)
        self.timeline = Timeline(directory, resume_step=resume_step, warn=table.note)
        self.samples = JsonlFile(directory / "samples.jsonl", resume_step=resume_step)
        self.drops = JsonlFile(directory / "dropped.jsonl", resume_step=resume_step)
        compares = {prefix_of(name): policy.algorithm.compares for name, policy in config.by_policy.items()}
        self._signal = Signal(compares)
        self._saving: asyncio.Task[Path] | None = None
        self.entered: Callable[[str, int], None] = lambda name, step: None
        """Function that is called with the name and the step of every phase when the phase starts."""
        self._phase = "start"
        self._phases = 0
        self._began = time.monotonic()

    def close(self) -> None:
        self.tracker.close()
        self.timeline.close()
        self.samples.close()
        self.drops.close()

    def engine_lost(self, name: str, error: SlimxError) -> None:
        """Reports that engine `name` was taken out of service because of `error`."""
        self.events.tell("engine_lost", f"engine {name} is lost: {first_line(error)}", about=name)

    def restarted(self, restart: Restart) -> None:
        """Reports the restart of a part of the run, and records it in the timeline, on a separate track for the
        part."""
        self._tell_restart("restart_failed" if restart.error else "restarted", restart)

    def trainers_replaced(self, restart: Restart) -> None:
        """Reports the restart of all trainer ranks; `restarted` does so for other parts of the run."""
        self._tell_restart("restart_failed" if restart.error else "trainers_replaced", restart)

    def trainers_shrunk(self, reason: str) -> None:
        """Reports that the run continues with fewer trainer ranks. `reason`: the message to report, which explains
        why."""
        self.table.note(reason)
        self.events.tell("trainers_shrunk", reason, about="trainers")

    def _tell_restart(self, kind: Kind, restart: Restart) -> None:
        self.events.tell(kind, str(restart), about=restart.part)
        name = "restart"
        detail = restart.reason
        if restart.error:
            name = "failed restart"
            detail = f"{restart.reason}; {restart.error}"
        self.timeline.add(
            Phase(name=name, step=None, track=restart.part, start=restart.at, seconds=restart.seconds, detail=detail)
        )

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Marks the `with` block as phase `name` of step `step`, in the timeline, the live table and `slimx status`."""
        self.table.phase(name)
        self._phase = name
        self._phases += 1
        self._began = time.monotonic()
        self.events.step = step or None
        self.entered(name, step)
        with self.timeline.phase(name, step=step):
            yield

    async def starting(self, part: str, work: Callable[[], Awaitable[object]]) -> None:
        """Awaits `work`, which starts `part`, and records the duration of the start in the timeline, on a separate
        track for the part, and its end in the log."""
        since = time.time()
        clock = time.perf_counter()
        await work()
        seconds = time.perf_counter() - clock
        self.timeline.add(Phase(name="start", step=None, track=part, start=since, seconds=seconds))
        self.table.milestone(f"{part} ready")

    def activity(self) -> Json:
        """Returns, for `slimx status`, the name of the current phase, the number of phases so far in this process, and
        the Unix time at which the phase started. This time is computed from the phase's duration so far, because the
        system clock may have been changed in the meantime."""
        since = time.time() - (time.monotonic() - self._began)
        return {"phase": self._phase, "number": self._phases, "since": since}

    def step(
        self, step: int, version: int | None, metrics: dict[str, float], groups: Sequence[Group], seconds: float
    ) -> None:
        """Logs the metrics of a finished step and the durations of its phases, updates the live table, and saves some
        of the step's samples. `version`: version of the engines' weights; None without engines. `seconds`: duration of
        the step.
        """
        phases = self.timeline.take(step)
        times = {}
        for name, duration in phases.items():
            times[f"time/{name}"] = duration
        times["time/step"] = seconds
        metrics = metrics | self._signal.counted(metrics)
        self.tracker.log(step, metrics | times, version=version)
        self.table.row(step, metrics | times)
        self.events.recorded(metrics)
        due = (step - 1) % self.config.track.samples_every == 0 or step == self.config.schedule.steps
        if version is not None and due:
            self._write_samples(groups, step=step, version=version, evaluation=False)

    def start(self, metrics: dict[str, float], version: int) -> None:
        """Logs metrics measured before the first step as those of step 0. `version`: version of the engines'
        weights."""
        if metrics:
            self.tracker.log(0, metrics, version=version)

    def evaluation(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Saves samples of an evaluation of the weights after `step` steps, and prints its result."""
        metric = "accuracy" if self.config.algorithm.scores else "reward"
        self.table.note(f"step {step}: held-out {metric} {metrics['eval/accuracy']:.3f}")
        self._write_samples(groups, step=step, version=step, evaluation=True)

    def drop(self, dropped: Dropped, step: int) -> None:
        """Records a group that will not be trained on, with the reason. `step`: the step whose metrics count the
        group."""
        self.drops.write({"step": step, **asdict(dropped)})

    def keep(self, step: int, version: int, batch: Batch, maker: GroupMaker) -> None:
        """Starts saving the groups of `step` before they are trained on, so that they can be inspected and replayed if
        training fails. `version`: version of the weights with which the trainers start the step. `maker`: source of the
        groups."""
        if self.rollouts is not None and self.rollouts.due(step):
            self._save(maker.aside(self.rollouts.write, step, version, batch.groups, batch.dropped))

    def keeps(self, step: int) -> bool:
        """Returns True if the groups of `step` are saved."""
        return self.rollouts is not None and self.rollouts.due(step)

    async def keep_trained(self, step: int, tokens: Sequence[TrainedTokens]) -> None:
        """Waits until the groups of `step` are saved, and then starts saving the values that the trainers computed for
        each token of these groups."""
        await self.kept()
        if self.rollouts is not None:
            self._save(in_thread(self.rollouts.write_trained, step, tokens))

    def _save(self, work: Coroutine[object, None, Path]) -> None:
        self._saving = asyncio.create_task(work)
        # Retrieves the error, so that asyncio does not report it again if the run ends before `kept` is called.
        self._saving.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def kept(self) -> None:
        """Waits until all saves that `keep` and `keep_trained` have started are complete. Raises SlimxError if one of
        them fails."""
        if self._saving is not None:
            await self._saving
            self._saving = None

    def _write_samples(self, groups: Sequence[Group], *, step: int, version: int, evaluation: bool) -> None:
        """Saves the first trajectory of a few groups as text. `version`: version of the weights that the step or
        evaluation used."""
        written = []
        for group in groups[: self.config.track.samples]:
            trajectory = group.trajectories[0]
            sample = RecordedSample(
                step=step,
                prompt=_text(group.prompt, self.tokenizers[ACTOR]),
                answer=group.prompt.answer or "",
                response=read_response(trajectory, self.tokenizers[trajectory.policy]).text,
                reward=float("nan") if trajectory.reward is None else trajectory.reward,
                version=version,
                evaluation=evaluation,
                images=group.prompt.metadata.get("images") if self.config.trainer.vision else None,
                reward_parts=trajectory.reward_parts,
            )
            self.samples.write(asdict(sample))
            written.append(sample)
        self.tracker.samples(step, written)


def open_tracker(config: Config, resume_step: int, warn: Callable[[str], None]) -> Tracker:
    """Opens the metrics files in `run.dir` and the tracking services that section `track` names. `resume_step`: first
    step whose entries are removed, together with those of later steps. `warn` is called with warning messages."""
    track = config.track
    return make_tracker(
        Path(config.run.dir),
        project=track.project,
        name=config.run.name,
        config=config.to_plain(),
        resume_step=resume_step,
        settings=dict(track),
        warn=warn,
    )


def _text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    if prompt.messages is None:
        return str(tokenizer.decode(prompt.token_ids or []))
    return "\n".join(str(message.get("content", "")) for message in prompt.messages)


def summary(directory: Path) -> Json:
    """Computes the summary of a finished run from its metrics.jsonl: a dict from descriptions, such as "loss, last
    step", to values."""
    rows = []
    with (directory / "metrics.jsonl").open() as file:
        for line in file:
            record = json.loads(line)
            rows.append(record["metrics"] | {"_step": record["step"]})

    def series(key: str) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    out: Json = {"steps": max((row["_step"] for row in rows), default=0)}
    rewards = series("reward/mean")
    accuracy = series("eval/accuracy")
    gap = series("gap/mean")
    if rewards:
        out["sampled reward, first step"] = round(rewards[0], 3)
        out["sampled reward, mean of last 10 steps"] = round(float(np.mean(rewards[-10:])), 3)
    if accuracy:
        metric = "held-out accuracy" if series("preference/loss") else "held-out reward"
        out[f"{metric} before"] = round(accuracy[0], 3)
        out[f"{metric} after"] = round(accuracy[-1], 3)
    if gap:
        out["log-prob gap trainer/engine, mean over steps"] = float(f"{np.mean(gap):.2e}")
        out["tokens with a gap above 1e-5 that no route explains"] = int(sum(series("gap/tokens_unexplained")))
    if series("loss/sft"):
        out["loss, last step"] = round(series("loss/sft")[-1], 4)
    phases: set[str] = set()
    for row in rows:
        for key in row:
            if key.startswith("memory/"):
                phases.add(key)
    for phase in sorted(phases):
        name = phase.removeprefix("memory/").removesuffix("_peak_mib")
        out[f"trainer memory at its peak, MiB ({name})"] = round(max(series(phase)), 1)
    skipped = int(sum(series("optim/skipped")))
    if skipped:
        out["optimizer steps skipped"] = skipped
    without_gradient = int(sum(series("optim/zero_gradient")))
    if without_gradient:
        out["optimizer steps without a gradient"] = without_gradient
    out["seconds of training"] = round(sum(series("time/step")), 1)
    return out
