"""Trackers: TensorBoard, Weights & Biases, MLflow, SwanLab, Prometheus."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slimx.errors import SlimxError
from slimx.extras.watch.background import InBackground
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.samples import RecordedSample
from slimx.observability.tracking.tracker import Sink, TrackedRun

if TYPE_CHECKING:
    from slimx.config.sections.general import Prometheus


def tensorboard(run: TrackedRun, on: bool) -> Sink | None:
    if not on:
        return None
    return TensorBoardSink(run)


def wandb(run: TrackedRun, on: bool) -> Sink | None:
    if not on:
        return None
    return WandbSink(run)


def mlflow(run: TrackedRun, uri: str | None) -> Sink | None:
    if not uri:
        return None
    return InBackground(MlflowSink(run, uri))


def swanlab(run: TrackedRun, on: bool) -> Sink | None:
    if not on:
        return None
    return SwanlabSink(run)


def prometheus(run: TrackedRun, endpoint: Prometheus) -> Sink | None:
    if endpoint.port is None:
        return None
    # Imported only if needed, because the import takes a tenth of a second.
    from slimx.extras.watch.prometheus import PrometheusSink

    return PrometheusSink(run.name, run.directory, endpoint.host, endpoint.port)


class TensorBoardSink:
    """Tracker that writes TensorBoard event files in RUN/tensorboard. After a resume, TensorBoard hides the events that
    an earlier process wrote for `run.resume_step` and later steps."""

    name = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        with _starting("tensorboard", "make the run directory writable"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(run.directory / "tensorboard"), purge_step=run.resume_step)
        self._writer.add_text("config", _verbatim(run.yaml), global_step=run.resume_step or 0)

    def log(self, record: StepRecord) -> None:
        for key, value in record.metrics.items():
            self._writer.add_scalar(key, value, global_step=record.step, walltime=record.time)
        # The writer runs in a thread; the flush makes a failure appear in the step that caused it.
        self._writer.flush()

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._writer.add_text(_kind(samples), _verbatim(_samples_text(samples)), global_step=step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Tracker that logs to Weights & Biases. A resumed run continues under the id in `RUN/wandb_id`. WANDB_MODE=offline
    needs no network.

    The step is logged as a metric and used as the x axis, because wandb's step counter only increases, and wandb would
    drop the steps that a resumed run repeats. With this axis, wandb draws repeated steps twice."""

    name = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        with _starting("wandb", "run `wandb login`"):
            import wandb

            self._wandb = wandb
            self._run = wandb.init(dir=str(run.directory), **run.named("wandb_id"))
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")

    def log(self, record: StepRecord) -> None:
        values = {"step": record.step, **record.metrics}
        if record.version is not None:
            values["version"] = record.version
        self._run.log(values)

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        columns = ["prompt", "expected", "response", "reward"]
        rows = [[sample.prompt, sample.answer or "", sample.response, sample.reward] for sample in samples]
        self._run.log({"step": step, _kind(samples): self._wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """Tracker that logs to MLflow at a tracking URI. A resumed run continues under the id in `RUN/mlflow_run`, and
    steps that it repeats are recorded twice. Samples and the configuration are stored as artifacts of the run."""

    name = "mlflow"
    PARAMETER_CHARACTERS = 500
    """Maximum number of characters in a parameter's value, because servers reject longer values. The artifact
    config.yaml contains the complete values."""

    def __init__(self, run: TrackedRun, uri: str) -> None:
        self._names = _MlflowNames()
        with _starting("mlflow", "set track.mlflow to the URI of a server that responds", off="null"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

            _reach(uri)  # without this check MLflow would retry for minutes
            self._metric = Metric
            self._client = MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name(run.project)
            id_file = run.directory / "mlflow_run"
            if id_file.exists():
                self._id = id_file.read_text().strip()
                self._client.update_run(self._id, status="RUNNING")
            else:
                experiment = known.experiment_id if known else self._client.create_experiment(run.project)
                self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
                id_file.write_text(self._id)
                values = [Param(key, value[: self.PARAMETER_CHARACTERS]) for key, value in _flat(run.config)]
                for start in range(0, len(values), 100):  # MLflow's limit per request
                    self._client.log_batch(self._id, params=values[start : start + 100])
            self._client.log_text(self._id, run.yaml, "config.yaml")

    def log(self, record: StepRecord) -> None:
        milliseconds = round(record.time * 1000)
        metrics = []
        for key, value in record.metrics.items():
            metrics.append(self._metric(self._names.name(key), value, milliseconds, record.step))
        for start in range(0, len(metrics), 1000):  # MLflow's limit per request
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._client.log_text(self._id, _samples_text(samples), f"{_kind(samples)}/step-{step:07d}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabSink:
    """Tracker that logs to SwanLab. A resumed run continues under the id in `RUN/swanlab_id`, and sends repeated steps
    a second time. SWANLAB_MODE=offline needs no network."""

    name = "swanlab"

    def __init__(self, run: TrackedRun) -> None:
        with _starting("swanlab", "run `swanlab login`"):
            import swanlab

            self._swanlab = swanlab
            self._run = swanlab.init(log_dir=str(run.directory / "swanlab"), **run.named("swanlab_id"))

    def log(self, record: StepRecord) -> None:
        self._run.log(dict(record.metrics), step=record.step)

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._run.log({_kind(samples): self._swanlab.Text(_samples_text(samples))}, step=step)

    def close(self) -> None:
        self._run.finish()


def _reach(uri: str) -> None:
    """Connects once to the server of an HTTP URI, as a check. Raises OSError if it does not accept the connection
    within 10 seconds. Other URIs are not checked."""
    address = urlsplit(uri)
    if address.scheme in ("http", "https") and address.hostname:
        socket.create_connection((address.hostname, address.port or _PORTS[address.scheme]), timeout=10).close()


_PORTS = {"http": 80, "https": 443}


class _MlflowNames:
    """Mapping from slimx's metric names to names that MLflow accepts. The MLflow name of a metric never changes, and no
    two metrics share one."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, key: str) -> str:
        """Returns the name under which MLflow stores slimx's metric `key`."""
        if key not in self._names:
            plain = re.sub(r"[^\w.\- :/]", "_", key)
            name = plain
            number = 2
            while name in self._names.values():
                name = f"{plain}_{number}"
                number += 1
            self._names[key] = name
        return self._names[key]


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            out += _flat(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", str(value)))
    return out


def _kind(samples: Sequence[RecordedSample]) -> str:
    return "samples/held-out" if samples[0].evaluation else "samples/training"


def _samples_text(samples: Sequence[RecordedSample]) -> str:
    """Formats samples as plain text."""
    texts = []
    for number, sample in enumerate(samples, start=1):
        texts.append(
            f"[{number}] reward {_number(sample.reward)}\n{sample.prompt}\n--- response\n{sample.response}\n"
            f"--- expected\n{sample.answer or ''}"
        )
    return "\n\n".join(texts)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:.4g}"


def _verbatim(text: str) -> str:
    """Returns Markdown that shows `text` verbatim, as an indented block: unlike a fenced block it needs no end marker,
    which the text could contain."""
    return "\n".join(f"    {line}" for line in text.splitlines())


@contextmanager
def _starting(key: str, remedy: str, off: str = "false") -> Iterator[None]:
    """Converts an exception that the package of `track.KEY` raises in the `with` block to a SlimxError. A rule has
    already checked that the package is installed. `remedy`: what the user can do; `off`: value of `track.KEY` that
    disables the tracker."""
    try:
        yield
    except Exception as error:
        raise SlimxError(
            f"track.{key} is set, but {key} could not be started ({error}); {remedy}, or set track.{key}={off}",
            code=f"track.{key}",
            about=f"track.{key}",
        ) from error
