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
    from slimx.config.sections.run import Prometheus


def tensorboard(run: TrackedRun, on: bool) -> Sink | None:
    return TensorBoardSink(run) if on else None


def wandb(run: TrackedRun, on: bool) -> Sink | None:
    return WandbSink(run) if on else None


def mlflow(run: TrackedRun, uri: str | None) -> Sink | None:
    return InBackground(MlflowSink(run, uri)) if uri else None


def swanlab(run: TrackedRun, on: bool) -> Sink | None:
    return SwanlabSink(run) if on else None


def prometheus(run: TrackedRun, endpoint: Prometheus) -> Sink | None:
    if endpoint.port is None:
        return None
    from slimx.extras.watch.prometheus import PrometheusSink  # a tenth of a second, for those who ask for it

    return PrometheusSink(run.name, run.directory, endpoint.host, endpoint.port)


class TensorBoardSink:
    """TensorBoard event files in RUN/tensorboard; on resume TensorBoard hides what an earlier process wrote for steps
    from `run.resume_step` on."""

    name = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        with _starting("tensorboard", "make its directory writable"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(run.directory / "tensorboard"), purge_step=run.resume_step)
        self._writer.add_text("config", _verbatim(run.yaml), global_step=run.resume_step or 0)

    def log(self, record: StepRecord) -> None:
        for key, value in record.metrics.items():
            self._writer.add_scalar(key, value, global_step=record.step, walltime=record.time)
        # The writer works in a thread: only a flush brings its failure to the step that it belongs to.
        self._writer.flush()

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._writer.add_text(_kind(samples), _verbatim(_told(samples)), global_step=step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; a resumed run continues under the id kept in `RUN/wandb_id`. WANDB_MODE=offline needs no
    network.

    The step is logged as a metric and used as the axis: wandb's own step counter only grows, and wandb would drop the
    steps that a resumed run does again. They are drawn twice instead.
    """

    name = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        with _starting("wandb", "log in"):
            import wandb

            self._wandb = wandb
            self._run = wandb.init(dir=str(run.directory), **run.named("wandb_id"))
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")

    def log(self, record: StepRecord) -> None:
        version = {} if record.version is None else {"version": record.version}
        self._run.log({"step": record.step, **version, **record.metrics})

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        columns = ["prompt", "expected", "response", "reward"]
        rows = [[sample.prompt, sample.answer or "", sample.response, sample.reward] for sample in samples]
        self._run.log({"step": step, _kind(samples): self._wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow at a tracking URI; a resumed run continues under the id kept in `RUN/mlflow_run`, and the steps that it
    does again are recorded twice. Samples and the configuration are artifacts of the run."""

    name = "mlflow"
    PARAMETER_CHARACTERS = 500
    """Longer values are cut: servers refuse them; the artifact config.yaml has them whole."""

    def __init__(self, run: TrackedRun, uri: str) -> None:
        self._names = _MlflowNames()
        with _starting("mlflow", "give the URI of a server that answers", off="null"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

            _reach(uri)  # MLflow itself would try for minutes
            self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
            known, id_file = self._client.get_experiment_by_name(run.project), run.directory / "mlflow_run"
            if id_file.exists():
                self._id = id_file.read_text().strip()
                self._client.update_run(self._id, status="RUNNING")
            else:
                experiment = known.experiment_id if known else self._client.create_experiment(run.project)
                self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
                id_file.write_text(self._id)
                values = [Param(key, value[: self.PARAMETER_CHARACTERS]) for key, value in _flat(run.config)]
                for start in range(0, len(values), 100):  # of one request, at most
                    self._client.log_batch(self._id, params=values[start : start + 100])
            self._client.log_text(self._id, run.yaml, "config.yaml")

    def log(self, record: StepRecord) -> None:
        at = round(record.time * 1000)
        metrics = [self._metric(self._names.of(key), value, at, record.step) for key, value in record.metrics.items()]
        for start in range(0, len(metrics), 1000):  # of one request, at most
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._client.log_text(self._id, _told(samples), f"{_kind(samples)}/step-{step:07d}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabSink:
    """SwanLab; a resumed run continues under the id kept in `RUN/swanlab_id`, and sends the steps that it does again.
    SWANLAB_MODE=offline needs no network."""

    name = "swanlab"

    def __init__(self, run: TrackedRun) -> None:
        with _starting("swanlab", "log in"):
            import swanlab

            self._swanlab = swanlab
            self._run = swanlab.init(log_dir=str(run.directory / "swanlab"), **run.named("swanlab_id"))

    def log(self, record: StepRecord) -> None:
        self._run.log(dict(record.metrics), step=record.step)

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._run.log({_kind(samples): self._swanlab.Text(_told(samples))}, step=step)

    def close(self) -> None:
        self._run.finish()


def _reach(uri: str) -> None:
    """Connect to the server of an HTTP address. Raises OSError if it does not listen within 10 seconds."""
    address = urlsplit(uri)
    if address.scheme in ("http", "https") and address.hostname:
        socket.create_connection((address.hostname, address.port or _PORTS[address.scheme]), timeout=10).close()


_PORTS = {"http": 80, "https": 443}


class _MlflowNames:
    """Names that MLflow takes, the same for the same metric; no two metrics share one."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def of(self, key: str) -> str:
        if key not in self._given:
            name = plain = re.sub(r"[^\w.\- :/]", "_", key)
            number = 2
            while name in self._given.values():
                name, number = f"{plain}_{number}", number + 1
            self._given[key] = name
        return self._given[key]


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for key, value in config.items():
        out += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", str(value))]
    return out


def _kind(samples: Sequence[RecordedSample]) -> str:
    return "samples/held-out" if samples[0].evaluation else "samples/training"


def _told(samples: Sequence[RecordedSample]) -> str:
    """The samples as plain text."""
    return "\n\n".join(
        f"[{number}] reward {_number(sample.reward)}\n{sample.prompt}\n--- response\n{sample.response}\n"
        f"--- expected\n{sample.answer or ''}"
        for number, sample in enumerate(samples, start=1)
    )


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "none"


def _verbatim(text: str) -> str:
    """Text as Markdown that shows it as it is: an indented block needs no end that the text could hold."""
    return "\n".join(f"    {line}" for line in text.splitlines())


@contextmanager
def _starting(key: str, remedy: str, off: str = "false") -> Iterator[None]:
    """Refuses what the package of `track.KEY` raises in the block; a rule looks whether it is installed."""
    try:
        yield
    except Exception as error:
        raise SlimxError(
            f"track.{key} is set but {key} did not start ({error}); {remedy} or set track.{key}={off}",
            code=f"track.{key}",
            about=f"track.{key}",
        ) from error
