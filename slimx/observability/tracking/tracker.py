"""The tracker of a run: each step's numbers and recorded samples go to a JSONL file and to every sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slimx.observability.tracking.background import InBackground
from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord, flatten
from slimx.observability.tracking.samples import RecordedSample
from slimx.observability.tracking.sinks import MlflowSink, Sink, SwanlabSink, TensorBoardSink, TrackedRun, WandbSink


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

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Shows recorded rollouts of one step as text in every sink; they are all held-out ones, or none is."""
        for sink, guard in self._others if samples else ():
            guard.call(lambda sink=sink: sink.samples(step, samples))

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
    project: str,
    name: str,
    config: Mapping[str, Any],
    resume_step: int | None,
    tensorboard: bool = False,
    wandb: bool = False,
    mlflow: str | None = None,
    swanlab: bool = False,
    prometheus: tuple[str, int] | None = None,
    warn: Callable[[str], None] = print_warning,
) -> Tracker:
    """The tracker of one run.

    `resume_step`: the next step to be done when a run is resumed (0 if it died before its first checkpoint); None for a
    fresh run, which refuses a directory that holds metrics. `mlflow`: tracking URI. `prometheus`: host and port.
    `config` is shown in every sink. A sink that cannot start raises SlimxError here.
    """
    with ExitStack() as undo:  # a sink that cannot start must not leave the earlier ones open
        jsonl = JsonlFile(run_dir / "metrics.jsonl", resume_step=resume_step)
        undo.callback(jsonl.close)
        run, others = TrackedRun(run_dir, project, name, config), []
        makers: list[Callable[[], Sink]] = [
            *([lambda: WandbSink(run)] if wandb else []),
            *([lambda: InBackground(MlflowSink(run, mlflow))] if mlflow else []),
            *([lambda: SwanlabSink(run)] if swanlab else []),
            *([lambda: TensorBoardSink(run, resume_step)] if tensorboard else []),
            *([lambda: _prometheus(name, run_dir, *prometheus)] if prometheus else []),
        ]
        for make in makers:
            others.append(make())
            undo.callback(others[-1].close)
        undo.pop_all()
    if jsonl.removed:
        warn(f"resumed at step {resume_step}: {jsonl.removed} later or damaged lines taken out of metrics.jsonl")
    return Tracker(jsonl, others, warn)


def _prometheus(run: str, directory: Path, host: str, port: int) -> Sink:
    from slimx.observability.tracking.prometheus import PrometheusSink  # a tenth of a second, for those who ask for it

    return PrometheusSink(run, directory, host, port)
