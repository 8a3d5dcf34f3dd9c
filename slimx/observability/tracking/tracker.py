"""Trackers of a step's numbers: a JSONL file always; TensorBoard and Weights & Biases if asked for."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from slimx.errors import SlimxError
from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord, flatten


class Sink(Protocol):
    """One destination of step records."""

    name: str

    def log(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """TensorBoard event files; on resume TensorBoard hides what an earlier process wrote for steps >= `resume_step`."""

    name = "tensorboard"

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SlimxError(
                "track.tensorboard is true but tensorboard is not installed: "
                "pip install tensorboard or set track.tensorboard=false",
                code="track.tensorboard",
                about="track.tensorboard",
            ) from error
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=resume_step)

    def log(self, record: StepRecord) -> None:
        for key, value in record.metrics.items():
            self._writer.add_scalar(key, value, global_step=record.step, walltime=record.time)
        # The writer works in a thread: only a flush brings its failure to the step that it belongs to.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; a resumed run continues under the id kept in `RUN/wandb_id`.

    The step is logged as a metric and used as the axis: wandb's own step counter only grows, and wandb would drop the
    steps that a resumed run does again. They are drawn twice instead.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SlimxError(
                "track.wandb is true but wandb is not installed: pip install wandb or set track.wandb=false",
                code="track.wandb",
                about="track.wandb",
            ) from error
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                config=dict(config),
                dir=str(run_dir),
                id=id_file.read_text().strip(),
                resume="allow",
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise SlimxError(
                f"track.wandb is true but wandb did not start ({error}); log in or set track.wandb=false",
                code="track.wandb",
                about="track.wandb",
            ) from error

    def log(self, record: StepRecord) -> None:
        version = {} if record.version is None else {"version": record.version}
        self._run.log({"step": record.step, **version, **record.metrics})

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """Sends each step's numbers to a JSONL file and to every sink.

    The file (`metrics.jsonl`, one StepRecord per line) is the run's record, which the report reads: if it fails, `log`
    raises. A sink may fail: the failure is counted, its first error is told through `warn`, and `close` tells the
    count.
    """

    def __init__(
        self, jsonl: JsonlFile, others: Sequence[Sink] = (), warn: Callable[[str], None] = print_warning
    ) -> None:
        self._jsonl = jsonl
        self._others = [(sink, Guard(sink.name, warn)) for sink in others]
        self._warn = warn
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, Any], *, version: int | None = None) -> None:
        """Logs one step, flat or nested `metrics` (see `flatten`); `version` is the weight version in force."""
        record = StepRecord(step=step, version=version, time=time.time(), metrics=flatten(metrics))
        self._jsonl.write(record.to_json())
        for sink, guard in self._others:
            guard.call(lambda sink=sink: sink.log(record))

    def close(self) -> dict[str, int]:
        """Closes every sink; tells and returns the failures by sink name (0 where all went well). Again is allowed."""
        if not self._closed:
            self._closed = True
            for sink, guard in self._others:
                guard.call(sink.close)
                if guard.failures:
                    self._warn(
                        f"{guard.name} failed {guard.failures} times; metrics.jsonl in the run directory is complete"
                    )
            self._jsonl.close()
        return {guard.name: guard.failures for _, guard in self._others}


def make_tracker(
    run_dir: Path,
    *,
    tensorboard: bool,
    wandb: bool,
    project: str,
    name: str,
    config: Mapping[str, Any],
    resume_step: int | None,
    warn: Callable[[str], None] = print_warning,
) -> Tracker:
    """The tracker of one run.

    `resume_step`: the next step to be done when a run is resumed (0 if it died before its first checkpoint); None for a
    fresh run, which refuses a directory that holds metrics. A sink that cannot start raises SlimxError here.
    """
    with ExitStack() as undo:  # a sink that cannot start must not leave the earlier ones open
        jsonl = JsonlFile(run_dir / "metrics.jsonl", resume_step=resume_step)
        undo.callback(jsonl.close)
        others: list[Sink] = []
        if wandb:
            others.append(WandbSink(run_dir, project=project, name=name, config=config))
            undo.callback(others[-1].close)
        if tensorboard:
            others.append(TensorBoardSink(run_dir / "tensorboard", resume_step))
        undo.pop_all()
    if jsonl.removed:
        warn(f"resumed at step {resume_step}: {jsonl.removed} later or torn lines taken out of metrics.jsonl")
    return Tracker(jsonl, others, warn)
